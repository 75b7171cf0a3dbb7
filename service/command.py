"""Serve the published snapshot of a collection over HTTP.

Every setting is an environment variable (docs/settings.md); the flags here are the ones needed most by hand.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from pydantic import ValidationError

from models.errors import did_you_mean
from service.errors import BadSettings
from service.settings import ENV_PREFIX, Settings

# Read by `care export`, by the clients and by deploy/haproxy.cfg.
OTHER_VARIABLES = frozenset({"CARE_API_KEY", "CARE_OPTIMUM_PYTHON", "CARE_PROXY", "CARE_SERVICE", "CARE_IN_FLIGHT"})
FLAGS = ("collection", "encoder", "host", "port", "workers", "device", "vectors")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--collection", type=Path, help="collection folder (CARE_COLLECTION)")
    parser.add_argument("--encoder", type=Path, help="query encoder folder (CARE_ENCODER)")
    parser.add_argument("--host", help="address to listen on (CARE_HOST)")
    parser.add_argument("--port", type=int, help="port to listen on (CARE_PORT)")
    parser.add_argument("--workers", type=int, help="HTTP processes (CARE_WORKERS)")
    parser.add_argument("--device", help="cpu or cuda (CARE_DEVICE)")
    parser.add_argument("--vectors", help="faiss, or a database as qdrant+http://host:6333/alias (CARE_VECTORS)")


def run(arguments: Namespace) -> None:
    serve(read_settings(arguments))


def serve(settings: Settings) -> None:
    """Runs one process, or a supervisor, which does not load what serves."""
    if settings.workers > 1 or settings.has_engine_process:
        from service.processes.supervisor import supervise

        supervise(settings)
    else:
        from service.processes.server import serve as serve_alone

        serve_alone(settings)


def require_known_variables() -> None:
    """Refuses an unknown CARE_ variable of the environment: it is misspelt. `care index` calls this, too."""
    known = [f"{ENV_PREFIX}{name}".upper() for name in Settings.model_fields]
    for variable in os.environ:
        name = variable.upper()
        if name.startswith(ENV_PREFIX) and name not in known and name not in OTHER_VARIABLES:
            raise BadSettings(f"{variable}: there is no such setting{did_you_mean(name, known)} (docs/settings.md)")


def read_settings(arguments: Namespace) -> Settings:
    """Reads the environment and the flags, which override it; refuses an unknown CARE_ variable."""
    require_known_variables()
    given = {name: getattr(arguments, name) for name in FLAGS if getattr(arguments, name) is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        names = [f"{ENV_PREFIX}{part}: ".upper() for part in first["loc"][:1]]
        reason = first["msg"].removeprefix("Value error, ")
        raise BadSettings(f"{''.join(names)}{reason} (docs/settings.md)") from error
