"""The shapes of /v1/documents: a document as it is shown, documents as they are posted, and what was done."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StringConstraints, model_validator

Id = Annotated[str, StringConstraints(min_length=1)] | StrictInt


class DocumentAnswer(BaseModel):
    """A whole document."""

    id: str
    title: str
    metadata: dict[str, Any]
    text: str
    snapshot: str


class PostedDocument(BaseModel):
    """A document, by the rules of a corpus: it has an id, under either name, and a text or a title."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", json_schema_extra={"oneOf": [{"required": ["id"]}, {"required": ["_id"]}]}
    )

    id: Id | None = Field(
        default=None, description="The caller's name for it; a document with the same id is replaced."
    )
    corpus_id: Id | None = Field(default=None, alias="_id", description="The id under the name that corpora give it.")
    title: str | None = None
    text: str | None = None
    metadata: dict[str, Any] | None = Field(
        default=None,
        description="Texts, numbers, true or false, lists of texts; a field holds one kind in all documents.",
    )

    @model_validator(mode="after")
    def _one_id(self) -> Self:
        if (self.id is None) == (self.corpus_id is None):
            raise ValueError("give an id, under one of the names id and _id")
        return self

    @property
    def name(self) -> str:
        """The id, whichever way it was given."""
        return str(self.corpus_id if self.id is None else self.id)


class DocumentsRequest(BaseModel):
    """Documents to add or replace: all of them, or none where one is wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: Annotated[list[PostedDocument], Field(fail_fast=True)]


class ChangesAnswer(BaseModel):
    """What was done, and is on the disk; in every worker's answers within a second."""

    position: int = Field(description="How far the log of changes is with this one.")
    changed: int = Field(description="How many documents are now otherwise than before.")
    snapshot: str
