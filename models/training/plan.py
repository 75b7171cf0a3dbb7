"""`care train --dry-run`: estimates steps, memory and hours of a recipe. Loads no weights.

Memory and hours are estimated from shapes: 2 operations a weight and token forward, twice that backward, another
forward where gradients are cached or activations recomputed. Examples and their lengths come from a sample of the rows.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from pathlib import Path

import numpy as np
from torch import nn

from models.errors import BadData
from models.prompts import ask_for_document
from models.rows import Pair, count_units, sample
from models.training.batches import batches_of, steps_of
from models.training.encoders import describe
from models.training.recipe import Encoder, Recipe
from models.training.rows import as_pairs, as_texts, sampled
from models.training.shapes import bare_model, check, is_decoder, shape_of
from models.training.sources import MISSING, missing, weights
from models.training.stages import (
    Contrast,
    Data,
    Generate,
    Loss,
    Mine,
    Reconstruct,
    Rerank,
    TrainedStage,
    trained_by,
)

# Weight, gradient and two moments, in float32.
ADAM_BYTES = 16
# Half-precision values that a layer's backward keeps, in widths a token; measured with BERT and with Qwen3-4B.
ENCODER_WIDTHS, DECODER_WIDTHS = 24, 52
# Tables (queries, documents) in float32 that the loss and its gradient hold at once.
SCORE_TABLES = 6
# What a token holds for each word that it might be while it is being named: scores, their logarithms and gradients.
WORD_BYTES = 12
SAMPLE = 2000


@dataclass(frozen=True, slots=True)
class Cost:
    """What one encoder is and costs; `body` are the weights that every token passes: all but the vocabulary."""

    whole: int
    trained: int
    layers: int
    width: int
    body: int
    layer_widths: int

    @property
    def words(self) -> int:
        return (self.whole - self.body) // self.width

    def memory(self, config: Encoder, tokens: int, *, trained: bool) -> float:
        """Bytes on the GPU for weights, optimiser and one chunk of activations."""
        if not trained:
            return self.whole * (2 if config.dtype == "bf16" else 4) + 4 * 2 * tokens * self.width
        base = 0 if config.lora is None else self.whole * (1 if config.bits else 2 if config.dtype == "bf16" else 4)
        kept = (self.layers + self.layer_widths) if config.checkpointing else self.layers * self.layer_widths
        return base + ADAM_BYTES * self.trained + 2 * tokens * self.width * kept

    def operations(self, config: Encoder, *, trained: bool, cached: bool) -> float:
        """Floating-point operations a token."""
        if not trained:
            return 2 * self.body
        return 2 * self.body * (1 + (1 if config.lora else 2) + int(cached) + int(config.checkpointing))


def cost_of(recipe: Recipe, name: str) -> Cost | None:
    """Counts on the backbone's shape, without weights; None if the shape is not known."""
    config, shape = recipe.encoders[name], shape_of(recipe, name)
    if shape is None:
        return None
    backbone = bare_model(shape, f"encoders.{name}")
    whole = trained = sum(weight.numel() for weight in backbone.parameters())
    features = shape.hidden_size + config.hidden
    projected = features * (config.projection or 0) + (shape.hidden_size + 1) * config.hidden
    vocabulary = sum(m.weight.numel() for m in backbone.modules() if isinstance(m, nn.Embedding))
    if config.lora is not None:
        targets = config.lora.targets
        linear = [(name.rpartition(".")[2], m) for name, m in backbone.named_modules() if isinstance(m, nn.Linear)]
        chosen = [m for name, m in linear if targets == "all-linear" or name in targets]
        trained = config.lora.rank * sum(m.in_features + m.out_features for m in chosen)
    widths = DECODER_WIDTHS if is_decoder(shape) else ENCODER_WIDTHS
    sizes = (whole + projected, trained + projected, shape.num_hidden_layers, shape.hidden_size)
    return Cost(*sizes, whole - vocabulary, widths)


def plan(recipe: Recipe, tflops: float) -> str:
    """Returns the plan as text; refuses a recipe whose parts do not fit."""
    check(recipe)
    costs = {name: cost_of(recipe, name) for name in recipe.encoders}
    lines = [recipe.about, f"space {recipe.space}, {recipe.dim} dimensions, seed {recipe.seed}", "", "encoders"]
    trained = {name for stage in recipe.stages.values() if not stage.skip for name in trained_by(stage)}
    for name, config in recipe.encoders.items():
        start, cost = f"copy of {config.copy_of}" if config.copy_of else config.start or "random weights", costs[name]
        size = f"{_count(cost.whole)} parameters" if cost else "shape not known"
        part = f"{_count(cost.trained)} trained" if cost else "trained"
        role = f"{part} ({describe(config)})" if name in trained else "only read"
        use = f"{config.pooling or 'own'} pooling, {config.max_length} tokens"
        use += f", joined with {config.beside.encoder} (share {config.beside.share:g})" if config.beside else ""
        lines.append(f"  {name:10} {start}: {size}, {role}, {use}")
    for name, stage in recipe.stages.items():
        lines += ["", f"stage {name}: {stage.kind}" + (", skipped" if stage.skip else "")]
        if not stage.skip:
            detail = _mine_lines(stage) if isinstance(stage, Mine) else _trained_lines(recipe, stage, costs, tflops)
            lines += [f"  {line}" for line in detail]
    if published := weights(recipe):
        lines += ["", "published weights", *(f"  {line}" for line in published)]
    if lacking := missing(recipe):
        lines += ["", MISSING, *(f"  {line}" for line in lacking)]
    return "\n".join(lines)


def _trained_lines(recipe: Recipe, stage: TrainedStage, costs: dict[str, Cost | None], tflops: float) -> list[str]:
    readers = [stage.query, stage.document or stage.query] if isinstance(stage, Contrast) else [stage.encoder]
    trained = trained_by(stage)
    length = f"{stage.epochs:g} epochs" if stage.epochs is not None else f"{stage.steps} steps"
    length += f" or {stage.minutes:g} minutes" if stage.minutes is not None else ""
    rates = stage.lr if isinstance(stage.lr, dict) else {"": stage.lr}
    rate = ", ".join(f"{Decimal(str(value)).normalize():e} {name}".strip() for name, value in rates.items())
    frozen = "".join(f", {name} frozen" for name in dict.fromkeys(readers) if name not in trained)
    lines = [
        f"peak learning rate {rate}, warm-up {stage.warmup:g}, {stage.schedule} schedule, AdamW, "
        f"weight decay {stage.weight_decay:g}, clip {stage.clip:g}",
        f"global batch {stage.batch:,}, {length}, {stage.precision}, chunks of {stage.tokens:,} tokens",
        f"trains {', '.join(trained)}{frozen}",
    ]
    if isinstance(stage, Contrast):
        loss = stage.loss
        terms = {"InfoNCE": loss.info_nce, "MSE": loss.mse, "score distillation": loss.distil, "alignment": loss.align}
        total = " + ".join(f"{weight:g} x {name}" for name, weight in terms.items() if weight)
        heat = f"temperature {'learned from ' if loss.learnable else ''}{loss.temperature:g}"
        dims = ", ".join(map(str, loss.dims or [recipe.dim_of(stage.query)]))
        lines.append(f"loss {total}, {heat}, dimensions {dims}, {stage.data.negatives} hard negatives")
        if loss.needs_targets or loss.needs_scores:
            lines.append(f"teacher {stage.teacher}, as the stage finds it{_margin_of(loss)}")
    if isinstance(stage, Rerank):
        taught = f" + {stage.loss.distil:g} x distillation from {stage.loss.teacher}" if stage.loss.distil else ""
        lines.append(f"loss {stage.loss.cross_entropy:g} x cross-entropy{taught}, lists of {1 + stage.data.negatives}")
    if isinstance(stage, Generate):
        lines.append("loss cross-entropy of the answer's tokens")
    if stage.note:
        lines.append(f"note: {stage.note}")
    known = {name: cost for name in dict.fromkeys(readers) if (cost := costs[name]) is not None}
    if len(known) < len(set(readers)):
        return [*lines, "memory and hours: the shape of an encoder is not known; put its weights where the recipe says"]
    memory = sum(c.memory(recipe.encoders[n], stage.tokens, trained=n in trained) for n, c in known.items())
    if isinstance(stage, Contrast):
        memory += 4 * SCORE_TABLES * stage.batch * stage.batch * (1 + stage.data.negatives)
    elif isinstance(stage, Reconstruct | Generate):
        memory += WORD_BYTES * stage.tokens * known[stage.encoder].words
    lines.append(f"memory about {memory / 2**30:.0f} GiB on each card")
    return [*lines, *_hours(recipe, stage, readers, known, tflops)]


def _hours(recipe: Recipe, stage: TrainedStage, readers: list[str], known: dict[str, Cost], tflops: float) -> list[str]:
    """Estimates hours: a trained encoder reads every drawn example, a frozen one every text of the files once."""
    longest = [recipe.encoders[name].max_length for name in readers]
    data = stage.data.model_copy(update={"view": "texts"}) if isinstance(stage, Reconstruct) else stage.data
    sizes = sizes_of(recipe, data, longest[0], longest[-1], written=isinstance(stage, Generate))
    lengths = list(map(float, longest)) if sizes is None else [sizes.query, sizes.document][-len(readers) :]
    if isinstance(stage, Rerank | Generate):  # a text here is a pair
        lengths = [float(longest[0]) if sizes is None else min(longest[0], sizes.query + sizes.document)]
    shares = [1.0, 1.0 + stage.data.negatives] if isinstance(stage, Contrast) else [1.0 + stage.data.negatives]
    tokens = [share * length for share, length in zip(shares, lengths, strict=True)]
    cached = not isinstance(stage, Rerank | Generate) and stage.batch * sum(tokens) > stage.tokens
    if isinstance(stage, Generate):  # its head is as large as its vocabulary
        known = {name: replace(cost, body=cost.whole) for name, cost in known.items()}
    work = {True: 0.0, False: 0.0}
    for name, read in zip(readers, tokens, strict=True):
        trained = name in trained_by(stage)
        work[trained] += read * known[name].operations(recipe.encoders[name], trained=trained, cached=cached)
    speed = tflops * 1e12 / work[True]
    read_lengths = " and ".join(f"{length:.0f}" for length in lengths)
    lines = [f"speed about {speed:,.1f} rows/s on one card at {tflops:g} TFLOP/s and {read_lengths} tokens a text"]
    if sizes is None and stage.steps is None:
        whole = 1e6 * sum(work.values()) / (tflops * 1e12) / 3600
        return [*lines, f"hours: {', '.join(stage.data.files)} not there yet; {whole:,.1f} h a million rows"]
    if sizes is not None and not sizes.examples:
        raise BadData(f"{', '.join(stage.data.files)}: no rows to train with; name other files in the stage's data")
    steps, drawn = _drawn(recipe, stage, sizes)
    once = min(drawn, sizes.examples if sizes else drawn) * work[False] / (tflops * 1e12) / 3600
    there = f"about {sizes.examples:,} rows, " if sizes else ""
    there += f"{steps:,} steps, " if stage.steps is None else ""
    reading = f", {once:,.2f} h of it for what is frozen" if once else ""
    training = min(drawn / speed / 3600, (stage.minutes or math.inf) / 60)
    return [*lines, f"{there}{training + once:,.2f} h on one card{reading}"]


def _drawn(recipe: Recipe, stage: TrainedStage, sizes: Sizes | None) -> tuple[int, float]:
    """Returns how many steps a stage has, and how many examples they draw; a batch has at most its source's."""
    rows, weighted = np.array([*sizes.sources.values()] if sizes else [stage.batch]), bool(stage.data.weights)
    steps = steps_of(rows, stage.batch, stage.epochs, stage.steps, recipe.max_steps, weighted=weighted)
    batches = batches_of(rows, stage.batch, stage.epochs or 1)
    in_batch = stage.batch if weighted else (batches * np.minimum(stage.batch, rows)).sum() / batches.sum()
    return steps, steps * float(in_batch)


def _margin_of(loss: Loss) -> str:
    """Says what the teacher decides apart from the terms: a recipe that takes these from another keeps its margin."""
    if not loss.drops_negatives:
        return ""
    return f"; a document that it scores {loss.false_negative_margin:g} above the answer is not a negative"


def _mine_lines(stage: Mine) -> list[str]:
    margin = "" if stage.margin is None else f", {stage.margin:g} below the positive"
    ranks = f"ranks {stage.ranks[0]} to {stage.ranks[1]}"
    return [f"{stage.count} negatives a pair from {ranks} of {stage.query}{margin}"]


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Examples (pairs, or texts), and the mean length of what is read of a query and of a document, in tokens."""

    examples: int
    query: float
    document: float
    sources: Mapping[str, int]
    """Examples by source."""


@lru_cache
def _sampled(files: tuple[Path, ...], seed: int) -> tuple[int, list[Pair]]:
    """Returns a sample of the rows; stages share files, and each is read once."""
    return sample(files, SAMPLE, seed)


def sizes_of(
    recipe: Recipe, data: Data, query_longest: int, document_longest: int, *, written: bool = False
) -> Sizes | None:
    """None where a file is not there. Texts that come twice are counted twice; rows that a stage makes of others
    count as its inputs. A document that is `written` is a hypothetical one, its query the prompt for it."""
    files, seed = tuple(Path(file) for name in data.files for file in _given(recipe, name)), recipe.seed
    if not all(path.is_file() for path in files):
        return None
    rows, drawn = _sampled(files, seed)
    share = rows / max(1, len(drawn))
    drawn = [pair for pair in drawn if pair.source not in data.without]
    there = {"*", *(pair.source for pair in drawn)}
    halved = {source: share for source, share in data.halves.items() if source in there}
    drawn = list(sampled(drawn, {}, halved, seed))
    if data.view == "texts":
        texts = as_texts(drawn, data, seed)
        pairs = [(source, text, text) for text, source in texts]
    elif written:
        pairs = [(pair.source, ask_for_document(pair.query), "".join(pair.hypothetical[:1])) for pair in drawn]
    else:
        pairs = [
            (pair.source, pair.query, pair.positives[0]) for pair in as_pairs(drawn, data.crops, seed, data.crop_units)
        ]
    query = ((source, min(query_longest, count_units(text))) for source, text, _ in pairs)
    document = ((source, min(document_longest, count_units(text))) for source, _, text in pairs)
    sources = {source: max(1, round(n * share)) for source, n in Counter(source for source, *_ in pairs).items()}
    return Sizes(round(len(pairs) * share), _mean(query, data.weights), _mean(document, data.weights), sources)


def _given(recipe: Recipe, file: str) -> list[str]:
    """Returns the files that a file is made of: itself, or the inputs of the stage that makes it."""
    if not file.startswith("@"):
        return [file]
    maker = recipe.stages[file[1:]]
    assert isinstance(maker, Mine)
    return [given for name in maker.files for given in _given(recipe, name)]


def _mean(lengths: Iterable[tuple[str, int]], weights: Mapping[str, float]) -> float:
    """As batches are drawn: by the sources' weights, or else every example alike."""
    by_source: dict[str, list[int]] = defaultdict(list)
    for source, length in lengths:
        by_source[source].append(length)
    default = weights.get("*", 1.0)
    shares = {name: weights.get(name, default) if weights else len(found) for name, found in by_source.items()}
    total = sum(share * sum(by_source[source]) / len(by_source[source]) for source, share in shares.items())
    return max(1.0, total / (sum(shares.values()) or 1.0))
