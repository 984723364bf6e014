"""Requests made up from the OpenAPI document: whatever fits the types, nothing ever breaks the gateway."""

import asyncio

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

TOKEN = "Bearer operator-token-0123456789"
ENDLESS = ("/control/v1/events", "/control/v1/ws")
ACCEPTED = {200, 400, 404, 409, 429}


@pytest.mark.timeout(120)
async def test_requests_made_from_the_document_never_break_the_gateway(start_world) -> None:
    world = await start_world()
    _, document = await world.send("GET", "/openapi.json")
    schema = schemathesis.openapi.from_dict(document)
    await asyncio.to_thread(_fuzz, schema, world.gateway.url)
    assert (await world.send("POST", "/control/v1/resume"))[0] == 200
    assert (await world.send("GET", "/ready"))[0] == 200
    assert (await world.send("GET", "/control/v1/self-check"))[1]["data"]["faults"] == []


def _fuzz(schema, url: str) -> None:
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in ENDLESS or operation.path.startswith("/v1/"):
            continue

        @given(case=operation.as_strategy())
        @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def ask(case) -> None:
            response = case.call(base_url=url, headers={"Authorization": TOKEN}, timeout=30)
            assert response.status_code in ACCEPTED, response.text

        ask()
