"""Requests and answers that /docs shows; a test sends the requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Examples:
    """Requests by name, and an answer."""

    requests: Mapping[str, dict[str, Any]]
    answer: dict[str, Any]


SEARCH = Examples(
    {
        "one query": {"query": "高血压吃什么药", "top_k": 5},
        "several queries": {
            "query": ["发烧怎么办", "chest pain first aid"],
            "mode": "dense",
            "fields": ["title", "text"],
        },
        "filters": {
            "query": "感冒",
            "filters": [
                {"field": "kind", "eq": "drug"},
                {"field": "department", "in": ["呼吸内科", "全科"]},
                {"field": "updated", "gte": "2025-01-01", "lt": "2026-01-01"},
            ],
        },
        "not and any": {
            "query": "感冒",
            "filters": [
                {"not": {"field": "kind", "eq": "test"}},
                {"any": [{"field": "department", "eq": "儿科"}, {"field": "updated", "gte": "2025-01-01"}]},
            ],
        },
        "the second page, with counts": {"query": "感冒", "top_k": 10, "offset": 10, "facets": ["kind"]},
        "passages for a language model": {
            "query": "糖尿病人能吃水果吗",
            "top_k": 3,
            "passages": 2,
            "min_score": 0.2,
            "fields": ["title", "text"],
            "timeout_ms": 2000,
        },
        "why these hits": {"query": "心绞痛", "explain": True, "weight": 0.5},
    },
    {
        "results": [
            {
                "hits": [
                    {
                        "score": 0.931207,
                        "id": "drug-001",
                        "title": "氨氯地平",
                        "metadata": {"kind": "drug", "department": "心血管内科", "updated": "2025-06-01"},
                        "snippet": "用于治疗高血压和心绞痛……",
                        "highlights": [[4, 7]],
                    }
                ],
                "truncated": False,
            }
        ],
        "snapshot": "20261115T041500123Z-1a2b3c4d",
        "timings_ms": {"tokenize": 0.05, "queue": 0.12, "encode": 1.9, "search": 0.4, "fetch": 0.1, "total": 2.6},
    },
)
EMBEDDINGS = Examples(
    {
        "one text": {"input": "高血压吃什么药"},
        "documents, shortened": {
            "input": ["氨氯地平用于治疗高血压。", "布洛芬用于退热。"],
            "input_type": "document",
            "dimensions": 256,
            "encoding_format": "base64",
        },
    },
    {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.0132, -0.0471, 0.0289]}],
        "model": "care-small-zh",
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    },
)
RERANK = Examples(
    {
        "texts": {
            "query": "发烧怎么办",
            "documents": ["布洛芬用于退热。", "氨氯地平用于治疗高血压。"],
            "top_n": 1,
            "return_documents": True,
        },
        "objects": {"query": "chest pain", "documents": [{"text": "Angina is chest pain."}, {"text": "A sprain."}]},
    },
    {
        "model": "care-small-zh",
        "results": [{"index": 0, "relevance_score": 0.712384, "document": {"text": "布洛芬用于退热。"}}],
        "usage": {"prompt_tokens": 31, "total_tokens": 31},
    },
)
DOCUMENTS = Examples(
    {
        "one document": {
            "documents": [
                {
                    "id": "notice-2026-11",
                    "title": "缬沙坦批次召回",
                    "text": "因检出杂质，部分批次的缬沙坦片自即日起召回。",
                    "metadata": {"kind": "notice", "updated": "2026-11-15"},
                }
            ]
        },
        "several documents": {
            "documents": [{"id": "a", "text": "Take with food."}, {"id": "b", "title": "Only a title"}]
        },
    },
    {"position": 42, "changed": 1, "snapshot": "20261115T041500123Z-1a2b3c4d"},
)
