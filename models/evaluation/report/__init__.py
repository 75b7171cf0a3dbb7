"""What a run found, shown: tables for a terminal and for Markdown, and a page with pictures."""

from models.evaluation.report.page import write
from models.evaluation.report.tables import markdown
from models.evaluation.report.tables import text as table

__all__ = ["markdown", "table", "write"]
