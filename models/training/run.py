"""A training run, top to bottom: load, tokenise, deal, step, save.

The folder of a run holds `log.jsonl` (one line a step that was logged), `checkpoint/` (what a resumed run needs)
and at the end `encoder/`. The same recipe in the same folder goes on where it stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from models.errors import CareError
from models.spec import SPEC_FILE, EncoderSpec
from models.tokenizer import Tokenizer
from models.torch_encoder import TorchEncoder
from models.training import checkpoint
from models.training.batches import BatchDealer, Drawn, Embeddings
from models.training.data import Padded, PairTable, TokenTable
from models.training.loss import distillation, info_nce, not_negatives
from models.training.recipe import Recipe
from models.training.teacher import LexicalTeacher, stretch
from models.transformers_folder import infer_spec

LOG_EVERY = 10


@dataclass(frozen=True)
class Run:
    """What every step needs and none changes, but for the student's weights and the optimiser's state."""

    recipe: Recipe
    table: PairTable
    dealer: BatchDealer
    student: TorchEncoder
    start: TorchEncoder
    lexical: LexicalTeacher | None
    optimiser: torch.optim.Optimizer
    device: torch.device


def train(recipe: Recipe, folder: Path, *, device: str | None = None, until: int | None = None) -> Path | None:
    """Runs the recipe; returns the encoder folder, or None if it stopped early at step `until`."""
    run = _prepare(recipe, torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    folder.mkdir(parents=True, exist_ok=True)
    first = checkpoint.restore(folder / "checkpoint", recipe, run.student, run.optimiser)
    last = min(recipe.optimiser.steps, until or recipe.optimiser.steps)
    with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
        _loop(run, first, last, folder, lambda line: print(json.dumps(line), file=log, flush=True))
    if last < recipe.optimiser.steps:
        return None
    blend(run.student, run.start, recipe.average)
    run.student.save(folder / "encoder")
    return folder / "encoder"


def _loop(run: Run, first: int, last: int, folder: Path, log: Callable[[dict[str, object]], None]) -> None:
    began = time.monotonic()
    bar = tqdm(range(first, last), initial=first, total=run.recipe.optimiser.steps, unit="step", disable=None)
    for step in bar:
        facts = _step(run, step)
        if step == first and not np.isfinite(facts["gradient_norm"]):
            raise CareError("the first gradient is not finite: try another attention kernel or a lower learning rate")
        if (step + 1) % LOG_EVERY == 0 or step + 1 == last:
            bar.set_postfix(loss=f"{facts['loss']:.3f}")
            log({"step": step + 1, **facts, "seconds": round(time.monotonic() - began, 1)})
        if (step + 1) % run.recipe.checkpoint_every == 0 or step + 1 == last:
            checkpoint.save(folder / "checkpoint", run.recipe, run.student, run.optimiser, step + 1)


def _prepare(recipe: Recipe, device: torch.device) -> Run:
    if device.type == "cuda":
        # cuDNN's attention was seen giving NaN gradients on padded batches.
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(recipe.seed)
    student, start = (_load(recipe).to(device) for _ in range(2))
    start.requires_grad_(False)
    tokenizers = (_cut(student, recipe.data.query_tokens), _cut(student, recipe.data.document_tokens))
    table = PairTable.build(recipe.data.files, tokenizers, device)
    dealer = BatchDealer(
        table,
        recipe.data.weights,
        default_weight=recipe.data.default_weight,
        size=recipe.batch.size,
        leaf=recipe.batch.leaf,
        hard_negatives=recipe.data.hard_negatives,
        seed=recipe.seed,
        embeddings=_embeddings(start, table.documents),
    )
    decayed = [p for p in student.parameters() if p.ndim > 1]
    plain = [p for p in student.parameters() if p.ndim <= 1]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.optimiser.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=recipe.optimiser.lr,
    )
    wants_lexical = recipe.loss.distil > 0 and recipe.loss.lexical_share > 0
    lexical = LexicalTeacher.fit(table.documents, seed=recipe.seed) if wants_lexical else None
    return Run(recipe, table, dealer, student.train(), start, lexical, optimiser, device)


def _load(recipe: Recipe) -> TorchEncoder:
    given = EncoderSpec.load(recipe.start) if (recipe.start / SPEC_FILE).is_file() else None
    spec = given or infer_spec(recipe.start, space=recipe.space, pooling=recipe.pooling)
    return TorchEncoder.load(recipe.start, spec.model_copy(update={"space": recipe.space}))


def _cut(encoder: TorchEncoder, tokens: int) -> Tokenizer:
    return Tokenizer.from_json(encoder.tokenizer_json, min(tokens, encoder.spec.max_length))


def _step(run: Run, step: int) -> dict[str, float]:
    recipe = run.recipe
    torch.manual_seed(recipe.seed * 1_000_003 + step)
    for group in run.optimiser.param_groups:
        group["lr"] = recipe.optimiser.lr * schedule(step, recipe.optimiser.steps, recipe.optimiser.warmup)
    drawn = run.dealer.deal(step)
    queries, documents = _gather(run, drawn, step)
    # The label of query i is document i: hard negatives come after all positives.
    labels = torch.arange(len(drawn.pairs), device=run.device)
    rows = torch.from_numpy(np.concatenate([drawn.positives, drawn.negatives])).to(run.device)
    with _autocast(run.device):
        scores = run.student(*queries) @ run.student(*documents).T
    ignored = not_negatives(rows[: len(labels)], rows, labels)
    contrast, distil = _losses(run, scores.float(), queries, documents, labels, ignored)
    loss = contrast + recipe.loss.distil * distil
    run.optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(run.student.parameters(), recipe.optimiser.clip)
    run.optimiser.step()
    return {
        "loss": float(loss.detach()),
        "info_nce": float(contrast.detach()),
        "distil": float(distil.detach()),
        "gradient_norm": float(norm),
    }


def _losses(
    run: Run, scores: torch.Tensor, queries: Padded, documents: Padded, labels: torch.Tensor, ignored: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    settings = run.recipe.loss
    if settings.distil == 0 and settings.false_negative_margin is None:
        return info_nce(scores, labels, ignored, settings.temperature), scores.new_zeros(())
    with torch.no_grad(), _autocast(run.device):
        dense = (run.start(*queries) @ run.start(*documents).T).float()
    if settings.false_negative_margin is not None:
        own = dense[labels, labels][:, None]
        likely = dense > own + settings.false_negative_margin
        likely[labels, labels] = False
        ignored = ignored | likely
    contrast = info_nce(scores, labels, ignored, settings.temperature)
    teacher = stretch(dense)
    if run.lexical is not None:
        share = settings.lexical_share
        teacher = (1 - share) * teacher + share * run.lexical.scores(queries, documents)
    return contrast, distillation(scores, teacher, settings.temperature, settings.teacher_temperature)


def _gather(run: Run, drawn: Drawn, step: int) -> tuple[Padded, Padded]:
    generator = np.random.default_rng([run.recipe.seed, step, 1])
    positives = torch.from_numpy(drawn.positives).to(run.device)
    if generator.random() < run.recipe.data.crops.get(drawn.source, 0.0):
        queries = run.table.documents.cropped(positives, generator, run.recipe.data.query_tokens)
    else:
        queries = run.table.queries.padded(torch.from_numpy(drawn.pairs).to(run.device))
    rows = torch.from_numpy(np.concatenate([drawn.positives, drawn.negatives])).to(run.device)
    return queries, run.table.documents.padded(rows)


@torch.inference_mode()
def _embeddings(encoder: TorchEncoder, documents: TokenTable) -> Embeddings:
    """The start's vectors of all training documents (documents, dim), batches of like lengths."""
    order = torch.argsort(documents.lengths)
    vectors = np.empty((len(order), encoder.spec.dim), dtype=np.float32)
    for rows in tqdm(torch.split(order, 512), desc="embed documents", unit="batch", disable=None):
        with _autocast(rows.device):
            vectors[rows.cpu().numpy()] = encoder(*documents.padded(rows)).float().cpu().numpy()
    return vectors


def schedule(step: int, steps: int, warmup: float) -> float:
    """Share of the learning rate at a step: linear up to 1, then linear down to 0."""
    rise = max(1, round(steps * warmup))
    return (step + 1) / rise if step < rise else max(0.0, (steps - step) / max(1, steps - rise))


@torch.no_grad()
def blend(student: TorchEncoder, start: TorchEncoder, share: float) -> None:
    """Student weights become share · student + (1 - share) · start."""
    for own, other in zip(student.parameters(), start.parameters(), strict=True):
        own.lerp_(other, 1 - share)


def _autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
