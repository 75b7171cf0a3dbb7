"""What the search page says about a collection: `page.json` in the collection's folder, and samples of its documents.

A collection without the file gets the page's own, general words. `care demo` brings the example corpus's file.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import RootModel, ValidationError

from service.errors import invalid_request
from service.schemas import PageWords
from service.serving import Serving

logger = logging.getLogger(__name__)

PAGE_FILE = "page.json"
SAMPLES = 4
SAMPLE_CHARACTERS = 40


class Page(RootModel[dict[str, PageWords]]):
    """By language: `zh`, `en`."""


def read_page(collection: Path) -> dict[str, PageWords]:
    """The words of the collection's `page.json`. A file that cannot be used is reported in the log and left out."""
    path = collection / PAGE_FILE
    try:
        return Page.model_validate_json(path.read_bytes()).root
    except FileNotFoundError:
        return {}
    except OSError as error:
        logger.warning("%s is not shown: %s", path, error)
    except ValidationError as error:
        logger.warning(
            "%s is not shown: %s; docs/operations.md has an example", path, invalid_request(error, PageWords)
        )
    return {}


def sample_documents(serving: Serving) -> list[str]:
    """Titles, or the beginnings of texts, of a few documents from all parts of the snapshot: queries to begin with."""
    count = len(serving.snapshot.documents)
    gone = frozenset() if serving.fresh is None else serving.fresh.gone
    rows = {count * place // SAMPLES for place in range(SAMPLES)} if count else set()
    headlines = [serving.snapshot.documents.get(row).headline for row in sorted(rows - gone)]
    return list(dict.fromkeys(headline[:SAMPLE_CHARACTERS].rstrip("… ") for headline in headlines))
