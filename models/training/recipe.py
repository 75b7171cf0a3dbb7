"""Recipe of a training run: every setting, parsed from one TOML file and checked.

`[encoders.NAME]` are what is trained, `[stages.NAME]` how, in the order of the file. A recipe may extend another
one: `base = "other.toml"`, and the keys that differ. Paths are relative to the folder from which `care` is called,
but for `base`; a file called "@NAME" is what the stage of that name wrote. What a stage may say is in
models.training.stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from models.encoder.spec import Pooling
from models.errors import BadData
from models.training.recipe_file import Tables, apply_change, no_such_key, read_tables
from models.training.stages import (
    AnyStage,
    Contrast,
    Count,
    Generate,
    Mine,
    Positive,
    Rerank,
    Section,
    Share,
    Stage,
    TrainedStage,
    encoders_of,
    files_of,
    trained_by,
)

RESERVED = {"vectors", "encoders", "start", "checkpoint", "objective", "decoder", "texts"}
"""What a run's folder and a checkpoint hold beside stages and encoders."""


class Lora(Section):
    """Low-rank adapters in place of training all weights."""

    rank: Positive
    alpha: Positive
    targets: list[str] | Literal["all-linear"] = "all-linear"
    dropout: Share = 0.0


class Fresh(Section):
    """A BERT with random weights, to try a recipe without downloaded weights."""

    tokenizer: Path
    width: Annotated[int, Field(gt=0, multiple_of=64)]
    layers: Positive


class Beside(Section):
    """An encoder whose vectors stand beside another's (`models.encoder.packed.joined`)."""

    encoder: str
    share: Annotated[float, Field(gt=0, lt=1)]
    """Its part in a cosine of the joined vectors."""


class Encoder(Section):
    """Where an encoder starts and what of it is trained."""

    start: Path | None = None
    """A transformers folder, an encoder folder or a GGUF file."""
    copy_of: str | None = None
    """Instead of `start`: another encoder, as it is when this one is first used."""
    fresh: Fresh | None = None
    """Instead of `start`: random weights."""
    beside: Beside | None = None
    """A second encoder that reads the same texts; only for encoders that are read, not trained."""
    dim: Positive | None = None
    """Dimensions of its own vectors. Default: the recipe's."""
    layers: Count | None = None
    """Number of first layers to keep. 0: a query is the mean of its tokens' vectors, without a network."""
    pooling: Pooling | None = None
    """Default: what the start's own files say."""
    max_length: Positive = 512
    instruction: str | None = None
    """A benchmark or one of its sets ("cmedteb/cmedteb-retrieval"), whose query instruction is put into
    `query_template`: evaluation and training share one wording."""
    query_template: str | None = None
    """What stands before a query, with {instruction} in it; also for the instructions of rows."""
    query_instruction: str | None = None
    """Instead of `instruction`: what stands before every query, as it is; instructions of rows are left out. Default:
    what the start's own files say."""
    document_instruction: str | None = None
    """Default: what the start's own files say; "" for none."""
    projection: Positive | None = None
    """Number of outputs of a trained linear layer behind pooling. A new one starts as the best linear map onto the
    teacher's vectors, if a stage has them (`loss.mse` or `loss.align`)."""
    hidden: Count = 0
    """Number of ReLU units between the pooled vector and a new projection, which reads both. Vectors can then have
    more directions than the pooled vector has numbers."""
    lora: Lora | None = None
    bits: Literal[8] | None = None
    """The base's linear layers in 8 bits; only with `lora`."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of weights that are not trained themselves: the base under `lora`, and any frozen encoder."""
    checkpointing: bool = False
    dropout: Share | None = None
    """Of hidden states and attention while it is trained. Default: what the start's configuration says."""

    @model_validator(mode="after")
    def _whole(self) -> Encoder:
        if sum(value is not None for value in (self.start, self.copy_of, self.fresh)) != 1:
            raise ValueError("give one of start, copy_of and fresh")
        if self.instruction is not None and self.query_instruction is not None:
            raise ValueError("give either instruction or query_instruction")
        if self.hidden and self.projection is None:
            raise ValueError("hidden is a part of a projection: give that, too")
        if self.bits is not None and self.lora is None:
            raise ValueError("bits is for the base under lora")
        return self


class Dev(Section):
    """A development set in BEIR's shape (`python -m models.training.holdout`): the best checkpoint is kept by it."""

    folder: Path
    every: Positive
    metric: str = "nDCG@10"


class Recipe(Section):
    """A whole run."""

    about: str
    space: Annotated[str, Field(min_length=1)]
    dim: Positive
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    max_steps: Positive | None = None
    """Limits the steps of each stage, to try a recipe out."""
    dev: Dev | None = None
    files: dict[str, str] = Field(default={})
    """Where files and weights come from: a `care curate` command without its --out, a `hf download` without its
    --local-dir, or a description of what the user must provide."""
    checksums: dict[str, str] = Field(default={})
    """Of published weights: the SHA-256 of a file, or for a folder why none is known."""
    encoders: Annotated[dict[str, Encoder], Field(min_length=1)]
    stages: Annotated[dict[str, Stage], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_fit(self) -> Recipe:
        if all(stage.skip for stage in self.stages.values()):
            raise ValueError("every stage is skipped: set skip of one to false")
        starts = {name for name, config in self.encoders.items() if config.copy_of is None}
        written: set[str] = set()
        for name, stage in self.stages.items():
            _check_names(f"stages.{name}", stage, set(self.encoders), written)
            if isinstance(stage, Mine) and not stage.skip:
                written.add(f"@{name}")
            if isinstance(stage, Contrast) and stage.average < 1 and not stage.skip:
                self._check_average(name, stage)
        for name in self.rerankers | self.generators:
            self._check_head(name)
        for name, config in self.encoders.items():
            if config.copy_of is not None and config.copy_of not in starts:
                raise ValueError(f"encoders.{name}.copy_of: {config.copy_of!r} is not an encoder with its own start")
            if config.beside is not None:
                self._check_beside(name, config.beside)
        if wrong := RESERVED & {*self.encoders, *self.stages}:
            raise ValueError(f"{wrong.pop()!r} is a folder of every run: choose another name")
        return self

    def _check_average(self, name: str, stage: Contrast) -> None:
        """Refuses to average an adapter: the mean of its two factors is not that of their products."""
        if adapted := [each for each in stage.train if self.encoders[each].lora is not None]:
            raise ValueError(f"stages.{name}.average: {adapted[0]!r} is trained by lora: leave one of the two out")

    def _check_beside(self, name: str, beside: Beside) -> None:
        """Refuses to train one of two joined encoders in a stage that joins them, and a second way of joining."""
        where, other = f"encoders.{name}.beside", self.encoders.get(beside.encoder)
        if other is None or other.beside is not None:
            raise ValueError(f"{where}: {beside.encoder!r} is not an encoder that stands alone")
        if any({name, beside.encoder} & set(trained_by(stage)) for stage in self.stages.values()):
            raise ValueError(f"{where}: neither {name!r} nor {beside.encoder!r} can be trained; train a copy of it")
        if any(config.beside not in (None, beside) for config in self.encoders.values()):
            raise ValueError(f"{where}: all joined encoders of a recipe share one space: give them one beside")

    def _check_head(self, name: str) -> None:
        """Refuses a reranker or generator with a projection or read by other stages, and a reranker with LoRA."""
        config, own = self.encoders[name], Rerank if name in self.rerankers else Generate
        what = "reranker" if own is Rerank else "generator"
        if config.lora is not None and own is Rerank:
            raise ValueError(f"encoders.{name}: a reranker is trained whole: leave lora out")
        if config.projection is not None:
            raise ValueError(f"encoders.{name}: a {what} gives no vectors: leave projection out")
        for place, stage in self.stages.items():
            read = list(encoders_of(stage))[int(isinstance(stage, own)) :]  # the first one is the model itself
            if name in read:
                raise ValueError(
                    f"stages.{place}: {name!r} becomes a {what}, which gives no vectors; read with a copy_of it"
                )

    @property
    def rerankers(self) -> set[str]:
        """The encoders that become rerankers."""
        return {stage.encoder for stage in self.stages.values() if isinstance(stage, Rerank)}

    @property
    def generators(self) -> set[str]:
        """The models that write texts."""
        return {stage.encoder for stage in self.stages.values() if isinstance(stage, Generate)}

    def read_by(self, stage: AnyStage) -> list[str]:
        """Returns the encoders that a stage uses, with those that stand beside them."""
        names = [*encoders_of(stage)]
        return [*names, *(beside.encoder for name in names if (beside := self.encoders[name].beside) is not None)]

    def copies_trained(self, name: str) -> bool:
        """Returns whether an encoder copies one that a stage has trained before the copy is first used."""
        for stage in (stage for stage in self.stages.values() if not stage.skip):
            if name in self.read_by(stage):
                return False
            if self.encoders[name].copy_of in trained_by(stage):
                return True
        return False

    @property
    def last_contrast(self) -> list[Contrast]:
        """The stage whose encoders a run writes at its end, if there is one."""
        return [stage for stage in self.stages.values() if isinstance(stage, Contrast) and not stage.skip][-1:]

    @property
    def folded(self) -> list[str]:
        """The query encoder whose documents two encoders read, if there is one: all are written in `dim` dimensions."""
        joined = [stage for stage in self.last_contrast if stage.document and self.encoders[stage.document].beside]
        return [stage.query for stage in joined if self.encoders[stage.query].projection is not None]

    def dim_of(self, encoder: str) -> int:
        """Returns how many dimensions the vectors of an encoder have, with those of the one beside it."""
        beside = self.encoders[encoder].beside
        return self.part_of(encoder) + (self.part_of(beside.encoder) if beside is not None else 0)

    def part_of(self, encoder: str) -> int:
        """Returns how many dimensions an encoder's own vectors have."""
        return self.encoders[encoder].dim or self.dim

    @classmethod
    def load(cls, path: Path, changes: Sequence[str] = ()) -> Recipe:
        """Reads a recipe, its bases below it, and changes like `stages.align.lr=1e-4` above it.

        A change is KEY=VALUE, the key with dots, the value as in TOML or a bare word.
        """
        values = read_tables(path)
        for change in changes:
            apply_change(values, change, _known_keys())
        return cls.of(values, str(path))

    @classmethod
    def of(cls, values: Tables, where: str) -> Recipe:
        """Returns the recipe of these tables; `where` is what an error names."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise BadData(f"{where}: {_first_fault(error)}") from error


def _check_names(where: str, stage: AnyStage, encoders: set[str], written: set[str]) -> None:
    """Checks the names in a stage: its encoders, those that it trains among its readers, and earlier stages."""
    for name in encoders_of(stage):
        if name not in encoders:
            raise ValueError(f"{where}: no encoder is called {name!r}")
    if isinstance(stage, Contrast) and (others := set(stage.train) - {stage.query, stage.document}):
        raise ValueError(f"{where}.train: {others.pop()!r} reads nothing in this stage")
    rates = stage.lr if isinstance(stage, TrainedStage) and isinstance(stage.lr, dict) else {}
    if others := set(rates) - set(trained_by(stage)):
        raise ValueError(f"{where}.lr: {others.pop()!r} is not trained in this stage")
    for file in files_of(stage):
        if file.startswith("@") and file not in written and not stage.skip:
            raise ValueError(f"{where}: {file}: no stage before this one writes pairs under that name")


def _first_fault(error: ValidationError) -> str:
    """Returns the first fault of a recipe, by its key and in words."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    if place[:1] == ["stages"]:
        del place[2:3]  # the kind of the stage, which is not part of the key
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = no_such_key(place[-1], _known_keys())
    elif first["type"] == "union_tag_not_found":
        message = "a stage needs a kind"
    return ": ".join(part for part in (".".join(place), message) if part)


def _known_keys() -> list[str]:
    sections = [Section]
    for section in sections:
        sections += section.__subclasses__()
    return sorted({key for section in sections for key in section.model_fields})
