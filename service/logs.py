"""Where log lines go: standard error, and the access log's to standard output."""

from __future__ import annotations

import logging
import sys

from service.settings import Settings

ACCESS_LOGGER = "service.access"


def configure_logging(settings: Settings, process: str = "") -> None:
    """Once per process; `process` names it in every line where there are several."""
    own = f" [{process}]" if process else ""
    line = f"%(asctime)s{own} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=settings.log_level.upper(), stream=sys.stderr, format=line)
    if settings.access_log:
        lines = logging.StreamHandler(sys.stdout)
        lines.setFormatter(logging.Formatter("%(message)s"))
        access_logger = logging.getLogger(ACCESS_LOGGER)
        access_logger.addHandler(lines)
        access_logger.setLevel(logging.INFO)
        access_logger.propagate = False
