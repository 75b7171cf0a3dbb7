"""HyDE: a language model writes documents that might answer the query, and their vectors help to find the real ones.

The query's vector becomes the mean of its own and those of its N hypothetical documents, brought back to unit length.
The model is behind any endpoint that speaks OpenAI's chat completions; what it wrote is kept in a folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from models.errors import CareError
from models.evaluation.cache import Vectors, text_hash, written_whole
from models.evaluation.readers import Reader
from models.evaluation.results import SystemFacts
from models.evaluation.sets import PairSet, Task
from models.evaluation.systems import NotApplicable
from models.evaluation.web import Endpoint
from models.spec import Side

TEMPERATURE = 0.7
MAX_TOKENS = 512
REQUESTS_AT_ONCE = 8
CHINESE = re.compile(r"[\u3400-\u9fff]")
CHINESE_PROMPT = (
    "请像医学教科书或科普文章那样写一段约两百字的文字，内容应能回答下面的问题。"
    "直接写正文，不要标题和客套话。\n\n问题：{query}"
)
OTHER_PROMPT = (
    "Write one passage of about 120 words, as a medical textbook or article would have it, that answers the question "
    "below. Give only the passage, without a heading.\n\nQuestion: {query}"
)


@dataclass(frozen=True, slots=True)
class Generator:
    """Writes `documents` hypothetical documents a query; `folder` None keeps nothing."""

    endpoint: Endpoint
    model: str
    documents: int
    folder: Path | None

    def write(self, queries: Sequence[str], prompt: str | None) -> list[list[str]]:
        """For each of the `documents` rounds, a document for each query."""
        prompts = [(prompt or prompt_for(query)).replace("{query}", query) for query in queries]
        jobs = [(text, number) for number in range(self.documents) for text in prompts]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            bar = tqdm(pool.map(self._write_one, jobs), f"{self.model} writes", len(jobs), leave=False, disable=None)
            texts = list(bar)
        return [texts[start : start + len(prompts)] for start in range(0, len(texts), len(prompts))]

    def _write_one(self, job: tuple[str, int]) -> str:
        prompt, number = job
        if self.folder is None:
            return self._ask(prompt, number)
        settings = f"{self.model} {TEMPERATURE} {MAX_TOKENS} {number}"
        path = self.folder / f"{text_hash(settings, prompt).hex()}.json"
        # A file that cannot be read is written anew, as every other part of the cache is.
        with suppress(OSError, ValueError, LookupError, TypeError):
            return str(json.loads(path.read_bytes())["document"])
        document = self._ask(prompt, number)
        with written_whole(path) as file:
            file.write(json.dumps({"prompt": prompt, "document": document}, ensure_ascii=False).encode())
        return document

    def _ask(self, prompt: str, seed: int) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": TEMPERATURE,
            "max_tokens": MAX_TOKENS,
            "seed": seed,
        }
        answer = self.endpoint.post("/chat/completions", body)
        try:
            document = str(answer["choices"][0]["message"]["content"] or "").strip()
        except (LookupError, TypeError) as error:
            raise CareError(f"{self.endpoint.base}: the answer is not a chat completion") from error
        if not document:
            raise CareError(f"{self.endpoint.base}: {self.model} wrote nothing; try another model")
        return document


@dataclass(frozen=True, slots=True)
class HydeReader:
    """Reads queries together with their hypothetical documents; documents are read as ever."""

    reader: Reader
    generator: Generator

    @property
    def facts(self) -> SystemFacts:
        plain, count = self.reader.facts, self.generator.documents
        name = f"HyDE {plain.name}" + (f" × {count}" if count > 1 else "")
        return SystemFacts(name, "hyde", plain.fingerprint, plain.dim, plain.parameters)

    def read(self, texts: Sequence[str], side: Side, task: Task) -> Vectors:
        if isinstance(task.data, PairSet):
            raise NotApplicable("HyDE writes answers to questions, and sentence pairs have none")
        vectors = self.reader.read(texts, side, task)
        if side is Side.DOCUMENT:
            return vectors
        for documents in self.generator.write(texts, task.hyde_prompt):
            vectors = vectors + self.reader.read(documents, Side.DOCUMENT, task)
        mean: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return mean

    def uncached(self) -> HydeReader:
        generator = Generator(self.generator.endpoint, self.generator.model, self.generator.documents, None)
        return HydeReader(self.reader.uncached(), generator)


def prompt_for(query: str) -> str:
    """Our prompt in the query's language; {query} stands for the query."""
    return CHINESE_PROMPT if CHINESE.search(query) else OTHER_PROMPT
