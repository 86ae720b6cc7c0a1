"""Bodies of any kind: an answer or a refusal, never a failure of the server, and nothing is left of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hispec.serving.openapi import REQUESTS
from tests.serving.support import Running, serving

QUICK = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
NAMES = st.text(max_size=5)
ANY = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
PATHS = {
    path: each["requestBody"]["content"]["application/json"]["schema"] for path, each in REQUESTS.items()
}


def of_schema(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that the server's own description allows."""
    if "anyOf" in schema:
        return st.one_of([of_schema(each) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=12)
        case "integer":
            return st.integers(low if low is not None else 0, min(high if high is not None else 300, 300))
        case "number":
            return st.floats(low if low is not None else -3.0, high if high is not None else 3.0)
        case "array":
            return st.lists(of_schema(schema["items"]), min_size=schema.get("minItems", 0), max_size=3)
        case "object" if "properties" in schema:
            needed = set(schema.get("required", ()))
            fields = {name: of_schema(each) for name, each in schema["properties"].items()}
            return st.fixed_dictionaries(
                {name: fields[name] for name in needed},
                optional={name: each for name, each in fields.items() if name not in needed},
            )
        case "object":
            return st.dictionaries(st.integers(0, 300).map(str), st.floats(-100.0, 100.0), max_size=3)
    return ANY


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Running]:
    with serving(tiny_path, max_tokens=8, engine={"speculative": {"draft": {"layer": 3}}}) as running:
        yield running
        running.settle()


def check(server: Running, path: str, content: bytes) -> None:
    answer = server.http.post(path, content=content)
    assert answer.status_code in (200, 400, 404, 429), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"]


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_the_description_allows(server: Running, path: str) -> None:
    @QUICK
    @given(of_schema(PATHS[path]))
    def run(body: Any) -> None:
        check(server, path, json.dumps({**body, "model": "tiny"}).encode())

    run()
    server.settle()


@pytest.mark.parametrize("path", PATHS)
def test_bodies_with_one_thing_wrong(server: Running, path: str) -> None:
    names = st.sampled_from(sorted(PATHS[path]["properties"])) | NAMES

    @QUICK
    @given(of_schema(PATHS[path]), names, ANY)
    def run(body: Any, name: str, value: Any) -> None:
        check(server, path, json.dumps({**body, "max_tokens": 4, name: value}).encode())

    run()
    server.settle()


@pytest.mark.parametrize("path", PATHS)
def test_bodies_of_any_bytes(server: Running, path: str) -> None:
    @QUICK
    @given(st.binary(max_size=60) | ANY.map(json.dumps).map(str.encode))
    def run(content: bytes) -> None:
        check(server, path, content)

    run()
    server.settle()
