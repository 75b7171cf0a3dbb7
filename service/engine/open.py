"""Opens the engine as the settings say: in this process, or as the client of the engine process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from models.encoder.pairs import PairReader
from models.encoder.spec import EncoderSpec
from models.encoder.tokenizer import TextReader
from service.engine.queue import Dispatcher, Limits
from service.engine.remote.client import RemoteEngine
from service.metrics import Metrics
from service.serving.serving import require_query_encoder
from service.settings import Settings

if TYPE_CHECKING:
    from service.engine.device import Device

# Queries and tokens of one batch: a CPU gains nothing by more, a GPU is idle with less.
BATCHES = {"cpu": (8, 4096), "cuda": (256, 32_768)}
# Requests of one worker that are never refused for a long wait, however slow the encoder is. A GPU needs two batches
# of requests, from all workers together.
FEW_REQUESTS = 32
CROWD_BATCHES = 2


def limits_of(settings: Settings) -> Limits:
    queries, tokens = BATCHES[settings.device]
    queries = settings.batch_queries or queries
    tokens = settings.batch_tokens or tokens
    crowd = max(FEW_REQUESTS, CROWD_BATCHES * queries // settings.workers)
    return Limits(queries, tokens, settings.queue_limit, settings.max_wait_ms / 1000, crowd)


# The functions below import what computes only if it is needed: a worker beside an engine process must not load it.
def load_encoder(settings: Settings, socket: Path | None) -> TextReader:
    """Loads the query encoder; only its tokenizer if an engine process computes behind `socket`, or a server."""
    folder = require_query_encoder(settings.encoder)
    if EncoderSpec.load(folder).address is not None:
        from models.encoder.address import AddressReader

        return AddressReader.open(folder)
    if socket is not None:
        return TextReader.open(folder, device=settings.device)
    from models.encoder.onnx import OnnxEncoder

    return OnnxEncoder.load(folder, threads=settings.encoder_threads)


def open_pair_reader(settings: Settings) -> PairReader | None:
    """Opens the tokenizer of the reranker, if there is one; the engine loads its weights."""
    return None if settings.reranker is None else PairReader.open(settings.reranker, device=settings.device)


def open_home(settings: Settings, metrics: Metrics, socket: Path | None) -> Dispatcher:
    """Opens the engine behind `socket`, or one in this process."""
    if socket is not None:
        return RemoteEngine(socket, limits_of(settings), metrics.waiting)
    from service.engine.device import Cpu, searched_by
    from service.engine.local import Batcher, InProcessEngine

    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.workers)
    device = Cpu(settings.encoder_threads, threads)
    reranker = None if settings.reranker is None else device.load_reranker(settings.reranker)
    engine = InProcessEngine(searched_by(device, settings.database), reranker)
    return Batcher(engine, limits_of(settings), metrics.batch)


def open_device(name: str, encoder_threads: int, threads: int) -> Device:
    """Opens `cpu` or `cuda`, which needs the gpu extra; the threads are the CPU's."""
    if name == "cuda":
        from service.engine.cuda import Cuda

        return Cuda()
    from service.engine.device import Cpu

    return Cpu(encoder_threads, threads)
