"""Requests made up from the OpenAPI document, fitting and unfitting: each operation answers as the document says."""

import asyncio

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

TOKEN = "Bearer operator-token-0123456789"
ENDLESS = "/control/v1/events"
"""Its answer never ends: only its beginning is looked at."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NUM_EXAMPLES = {GenerationMode.POSITIVE: 8, GenerationMode.NEGATIVE: 4}
ACCEPTED = {
    GenerationMode.POSITIVE: {200, 400, 404, 409, 429},
    GenerationMode.NEGATIVE: {200, 400, 401, 404, 405, 409, 415, 429},
}
"""Fitting the types isn't all: a knob has a range. Unfitting: without the token, or with what a default mends."""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("mode", list(GenerationMode))
async def test_every_operation_of_the_document_answers_generated_requests_as_it_says(start_world, mode) -> None:
    world = await start_world(max_model_len=64)
    _, document = await world.send("GET", "/openapi.json")
    schema = schemathesis.openapi.from_dict(document)
    tried = await asyncio.to_thread(_fuzz, schema, world.gateway.url, mode)
    described = {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert sorted(described) == sorted(f"{route.method} {route.path}" for route in world.gateway.routes())
    if (
        mode is GenerationMode.NEGATIVE
    ):  # what takes nothing, or any word in its path, can't be given anything unfitting
        described = {name: found for name, found in described.items() if _takes_fields(found)}
    assert sorted(tried) == sorted(described)
    assert (await world.send("POST", "/control/v1/resume"))[0] == 200
    assert (await world.send("GET", "/ready"))[0] == 200
    assert (await world.send("GET", "/control/v1/self-check"))[1]["data"]["faults"] == []


def _takes_fields(operation: dict) -> bool:
    parameters = operation.get("parameters", [])
    return "requestBody" in operation or any(parameter["in"] == "query" for parameter in parameters)


def _fuzz(schema, url: str, mode: GenerationMode) -> list[str]:
    tried = []
    for result in schema.get_all_operations():
        operation = result.ok()
        takes = [*operation.body, *operation.query]
        if mode is GenerationMode.NEGATIVE and not takes:
            continue
        tried.append(f"{operation.method.upper()} {operation.path}")

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=NUM_EXAMPLES[mode], deadline=None, suppress_health_check=list(HealthCheck), database=None
        )
        def ask(case) -> None:
            headers = {"Authorization": TOKEN}
            if case.path == ENDLESS:
                sent = case.as_transport_kwargs(base_url=url, headers=headers)
                with requests.request(**{**sent, "stream": True, "timeout": 30}) as response:
                    assert response.status_code in ACCEPTED[mode]
                return
            response = case.call(base_url=url, headers=headers, timeout=30)
            assert response.status_code in ACCEPTED[mode], response.text
            case.validate_response(response, checks=CHECKS)

        ask()
    return tried
