"""The shapes of the routes that take texts of the caller's own: embeddings as OpenAI has them, and reranking as Cohere
and Jina have it. Fields that such clients send and that mean nothing here are taken and ignored, one by one."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from models.encoder.spec import Side


class EncodingFormat(StrEnum):
    """Numbers, or the little-endian 32-bit floats themselves, which a client reads without parsing."""

    FLOAT = "float"
    BASE64 = "base64"


def _refuse_tokens(given: Any) -> Any:  # noqa: ANN401 (whatever a client sent)
    if isinstance(given, list) and any(isinstance(each, int | list) for each in given):
        raise ValueError("token arrays are not read, since tokens of another model mean nothing here; send texts")
    return given


class EmbeddingsRequest(BaseModel):
    """One text or several that want their embeddings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Annotated[str | Annotated[list[str], Field(fail_fast=True)], BeforeValidator(_refuse_tokens)] = Field(
        description="A text, or a list of texts whose embeddings come in their order. Long texts are cut."
    )
    model: str | None = Field(default=None, description="The model that /v1/models names, or nothing.")
    input_type: Side = Field(
        default=Side.QUERY,
        description="What the texts are; document only where the service's encoder reads documents too.",
    )
    dimensions: int | None = Field(default=None, description="How many of the first dimensions to keep, normed again.")
    encoding_format: EncodingFormat = EncodingFormat.FLOAT
    user: str | None = Field(default=None, description="Taken and ignored.")

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class Embedding(BaseModel):
    """The unit vector of one text: numbers or base64, as asked."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that the encoder read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(BaseModel):
    """One embedding per text, in the order given."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ModelFacts(BaseModel):
    """A model that the service runs."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="When the snapshot that it serves was built, in seconds since 1970.")
    owned_by: str = "care-search"


class ModelsAnswer(BaseModel):
    """The models that the service runs: one."""

    object: Literal["list"] = "list"
    data: list[ModelFacts]


class RerankDocument(BaseModel):
    """A document as an object; what it holds beside its text is ignored."""

    model_config = ConfigDict(frozen=True)

    text: str


class RerankRequest(BaseModel):
    """A query, and documents to be put into order by how well they answer it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    query: str
    documents: Annotated[list[str | RerankDocument], Field(fail_fast=True)] = Field(
        description="Texts, or objects with a text. Long texts are cut."
    )
    model: str | None = Field(default=None, description="The model that /v1/models names, or nothing.")
    top_n: Annotated[int, Field(ge=1)] | None = Field(default=None, description="How many of the best to give back.")
    return_documents: bool = Field(default=False, description="Whether the results hold the documents' texts.")

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


class RerankResult(BaseModel):
    """A document by its place in the request, and its score."""

    index: int
    relevance_score: float = Field(description="The cosine of the query's and the document's embeddings.")
    document: RerankDocument | None = None


class RerankAnswer(BaseModel):
    """The documents, best first."""

    model: str
    results: list[RerankResult]
    usage: Usage
