"""Stages of a recipe: what each kind of stage reads, trains and writes, and with which settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Units = tuple[Positive, Positive]
"""The fewest and the most words or Chinese characters of a span."""
CROP_UNITS: Units = (4, 64)


class Section(BaseModel):
    """A table of a recipe: a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Data(Section):
    """Which rows are read, as what, and how often each source is drawn."""

    files: Annotated[list[str], Field(min_length=1)]
    without: list[str] = []
    """Sources whose rows are left out, as if the files did not have them."""
    view: Literal["pairs", "texts"] = "pairs"
    """pairs: a query and its documents. texts: every text of the files, as query and as document of itself; the queries
    of all sources are then a source of their own, "queries"."""
    documents: bool = True
    """In view texts: whole documents, too."""
    sentences: bool = False
    """In view texts: the sentences of a document, too."""
    crops: dict[str, Weight] = {}
    """Random spans of a document added for each row, by source ("*": all others): as queries for it, or as texts."""
    crop_units: Units = CROP_UNITS
    """How short and how long such a span may be."""
    halves: dict[str, Share] = {}
    """Share of the rows, by source ("*": all others), in which a part of the document asks for the rest, instead of the
    query."""
    negatives: Count = 0
    """Hard negatives drawn for each pair."""
    weights: dict[str, Weight] = {}
    """Share of the batches by source, "*" for those not named; without weights every row comes once an epoch."""
    leaf: Positive | None = None
    """Batches are made of groups of this many neighbouring documents, which makes in-batch negatives hard."""

    @model_validator(mode="after")
    def _units_are_ordered(self) -> Data:
        if self.crop_units[0] > self.crop_units[1]:
            raise ValueError("crop_units: write the fewest units first, then the most")
        return self


class Loss(Section):
    """Weights of the terms, and what they need."""

    info_nce: Weight = 1.0
    mse: Weight = 0.0
    """Squared distance between the trained reading of a query and the teacher's."""
    distil: Weight = 0.0
    """Divergence of the batch's scores from the teacher's."""
    align: Weight = 0.0
    """Divergence of a query's embedding, as a distribution over dimensions, from the teacher's (KALE). Both sides use
    `temperature`."""
    teacher: str | None = None
    """A frozen encoder, or "start": the trained encoder as the stage found it. Default: the document encoder."""
    teacher_temperature: Above = 1.0
    lexical_share: Share = 0.0
    """How much of the teacher's score is BM25."""
    false_negative_margin: Finite | None = None
    """Documents that the teacher scores above the positive by more than this are not negatives. 2, by which no cosines
    differ, leaves out what a base recipe gives."""
    similarity: Literal["cosine", "dot"] = "cosine"
    """dot: inner products of trained vectors as they are. What is written is searched by cosine all the same."""
    temperature: Above = 0.02
    learnable: bool = False
    """The temperature is trained, too."""
    own_negatives: bool = False
    """A hard negative counts for its own row alone; in-batch negatives are then the other rows' positives."""
    symmetric: bool = False
    """Documents look for their queries as well."""
    dims: list[Positive] = []
    """Matryoshka: the loss is the mean over these dimensions; empty: the recipe's `dim` alone."""

    @model_validator(mode="after")
    def _something_counts(self) -> Loss:
        if not (self.info_nce or self.mse or self.distil or self.align):
            raise ValueError("every term has weight 0: give info_nce, mse, distil or align another")
        return self

    @property
    def needs_targets(self) -> bool:
        """Returns whether the teacher's vectors of queries are needed."""
        return self.mse > 0 or self.align > 0

    @property
    def needs_scores(self) -> bool:
        """Returns whether the teacher's scores of queries and documents are needed."""
        return self.distil > 0 or self.drops_negatives

    @property
    def drops_negatives(self) -> bool:
        """Returns whether the teacher decides what is a negative."""
        return self.false_negative_margin is not None and self.false_negative_margin < 2


class _Trained(Section):
    """What every stage that changes weights has."""

    skip: bool = False
    note: str = ""
    """Shown in the plan."""
    data: Data
    batch: Positive
    epochs: Above | None = None
    steps: Positive | None = None
    lr: Above | dict[str, Above]
    """Peak learning rate, of all encoders or by encoder."""
    warmup: Weight = 0.0
    """Share of the steps, or from 1 on their number."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    weight_decay: Weight = 0.01
    clip: Above = 1.0
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    tokens: Positive = 16384
    """Padded tokens that a step holds with their graphs, of everything that is read in it."""
    minutes: Above | None = None
    """The stage ends after so much time with its steps, if some are left; then the learning rate has fallen by time.
    For rented machines: on a faster one the same recipe gives other weights."""
    checkpoint_every: Positive = 500
    snapshots: list[Positive] = []
    """Steps after which the encoders are written, as well as at the end: for curves by texts seen."""

    @model_validator(mode="after")
    def _one_length(self) -> _Trained:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self


class Contrast(_Trained):
    """Queries find their documents."""

    kind: Literal["contrast"]
    query: str
    document: str | None = None
    """Default: the query encoder reads both."""
    train: Annotated[list[str], Field(min_length=1)]
    loss: Loss = Loss()
    average: Share = 1.0
    """Weight of the trained parameters in the result; the rest is what the stage began with."""

    @property
    def teacher(self) -> str:
        """The name of the teacher: an encoder as it was when the stage began."""
        return self.query if self.loss.teacher == "start" else self.loss.teacher or self.document or self.query


class Reconstruct(_Trained):
    """RetroMAE: a weak decoder rebuilds a text from its embedding."""

    kind: Literal["reconstruct"]
    encoder: str
    encoder_mask: Share = 0.3
    decoder_mask: Share = 0.5


class ListLoss(Section):
    """Weights of the terms over a list of documents: the positive and its negatives."""

    cross_entropy: Weight = 1.0
    """Of the positive among the list."""
    distil: Weight = 0.0
    """Divergence of the list's scores from the teacher's."""
    teacher: str | None = None
    """A frozen encoder, whose cosines are the teacher's scores."""
    teacher_temperature: Above = 0.05

    @model_validator(mode="after")
    def _something_counts(self) -> ListLoss:
        if not (self.cross_entropy or self.distil):
            raise ValueError("every term has weight 0: give cross_entropy or distil another")
        if self.distil and self.teacher is None:
            raise ValueError("distil needs a teacher: name an encoder")
        return self


class Rerank(_Trained):
    """A reranker (cross-encoder) puts lists of documents into order; BERT or XLM-R with a head of one score.

    `data.negatives` is the length of a list less its positive. A row with fewer negatives gets other rows' positives.
    """

    kind: Literal["rerank"]
    encoder: str
    """The encoder whose backbone becomes the reranker. Its `max_length` counts the tokens of a pair."""
    first: str | None = None
    """The encoder whose best documents are reranked in the development sets. Default: these are not judged."""
    depth: Positive = 20
    """How many of them."""
    loss: ListLoss = ListLoss()

    @model_validator(mode="after")
    def _lists_have_negatives(self) -> Rerank:
        if not self.data.negatives:
            raise ValueError("data.negatives is 0: a list of the positive alone teaches nothing; set it to 1 or more")
        return self


class Generate(_Trained):
    """A causal language model learns to write a row's `hypothetical` documents for its query (SL-HyDE's generator).

    Files of later stages may be missing until it is tuned: it writes them.
    """

    kind: Literal["generate"]
    encoder: str
    """The model: a chat model with its head. Its `max_length` counts the tokens of prompt and answer."""


class Mine(Section):
    """Adds hard negatives to those that a row has: what an encoder finds and the row does not name."""

    kind: Literal["mine"]
    skip: bool = False
    files: Annotated[list[str], Field(min_length=1)]
    query: str
    """The encoder of queries, and of documents where no other is named."""
    document: str | None = None
    corpus: list[str] = []
    """Files whose documents are searched. Default: the documents of the rows."""
    within: Literal["all", "source"] = "all"
    """Which documents a row may find: all, or those of its own source."""
    count: Positive = 7
    """Negatives that are added to a row."""
    ranks: tuple[Count, Positive] = (0, 100)
    """Negatives are drawn from these ranks, the first included, the last not."""
    margin: Finite | None = None
    """Only what scores lower than the best positive by at least this."""
    sources: list[str] = []
    """Only these; empty: all. Rows of others pass unchanged."""
    sample: dict[str, Share] = {}
    """Share of the rows that are read, by source ("*": all others); what is left out is not written. Default: all."""
    halves: dict[str, Share] = {}
    """Share of these rows, by source, in which a part of the document asks for the rest, instead of the query."""

    @model_validator(mode="after")
    def _ranks_are_ordered(self) -> Mine:
        if self.ranks[0] >= self.ranks[1]:
            raise ValueError("ranks: write the first rank that counts, then the first that does not")
        return self


TrainedStage = Contrast | Reconstruct | Rerank | Generate
AnyStage = TrainedStage | Mine
Stage = Annotated[AnyStage, Field(discriminator="kind")]


def files_of(stage: AnyStage) -> list[str]:
    """Returns the files that a stage reads, as the recipe names them."""
    if isinstance(stage, TrainedStage):
        return stage.data.files
    return [*stage.files, *stage.corpus]


def trained_by(stage: AnyStage) -> list[str]:
    """Returns the encoders that a stage changes."""
    if isinstance(stage, Contrast):
        return list(dict.fromkeys(stage.train))
    return [stage.encoder] if isinstance(stage, Reconstruct | Rerank | Generate) else []


def encoders_of(stage: AnyStage) -> Iterator[str]:
    """Yields the encoders that a stage reads with, some of them twice."""
    if isinstance(stage, Reconstruct | Rerank | Generate):
        yield stage.encoder
        if isinstance(stage, Rerank):
            yield from filter(None, (stage.first, stage.loss.teacher))
        return
    yield stage.query
    if stage.document is not None:
        yield stage.document
    if isinstance(stage, Contrast) and stage.loss.teacher not in (None, "start"):
        yield str(stage.loss.teacher)
