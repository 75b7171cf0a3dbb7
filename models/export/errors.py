"""What can go wrong between a checkpoint and a served graph, beside a failed parity check."""

from models.errors import CareError


class ExportError(CareError):
    """A source, an exporter or an environment that cannot give the graph that was asked for."""
