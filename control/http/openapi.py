"""`/openapi.json`: the document is made from the routes, the message types and the engine's knob table."""

import inspect
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from schedtop import __version__
from schedtop.control.http.auth import Scope
from schedtop.control.http.openai_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from schedtop.control.http.playbooks import StartPlaybook, StopPlaybook
from schedtop.control.http.routes import COMMAND_ROUTES, PREFIX, CommandRoute
from schedtop.engine.knobs import KnobSpec
from schedtop.engine.snapshot import Viewport

Json = dict[str, Any]
_BODIES: dict[str, type] = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest,
    f"{PREFIX}/playbooks/start": StartPlaybook, f"{PREFIX}/playbooks/stop": StopPlaybook,
}  # fmt: skip
_REF = "#/components/schemas/{name}"
_JSON_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "choice": "string"}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class AnyRoute(Protocol):
    """A path, whatever handles it."""

    @property
    def method(self) -> str:
        """GET, POST or PATCH."""
        ...

    @property
    def path(self) -> str:
        """As in the URL."""
        ...

    @property
    def scope(self) -> Scope:
        """What a token must grant."""
        ...

    @property
    def handler(self) -> Any:
        """Its docstring says what the path is for."""
        ...


def document(routes: Iterable[AnyRoute], knobs: Sequence[KnobSpec], open_to_all: Collection[Scope] = ()) -> Json:
    """The whole document. With no knobs (no engine yet) values of any name are described.

    `open_to_all`: scopes that need no token in this gateway.
    """
    schemas = _schemas()
    schemas["SetKnobs"]["properties"]["changes"] = _knob_changes(knobs)
    schemas["Error"] = _ERROR
    commands = {(route.method, route.path): route for route in COMMAND_ROUTES}
    paths: dict[str, Json] = {}
    for route in routes:
        command = commands.get((route.method, route.path))
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, command, schemas)
        if route.scope in open_to_all:
            paths[route.path][route.method.lower()]["security"].append({})
    return {
        "openapi": "3.1.0",
        "info": {"title": "schedtop gateway", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _schemas() -> dict[str, Json]:
    """Schemas of all messages that go over HTTP. A command's tag is left out: the path says which command it is."""
    types = [kind for route in COMMAND_ROUTES for kind in (route.command, route.answer)]
    _, schemas = msgspec.json.schema_components([*types, *_BODIES.values(), Viewport], ref_template=_REF)
    for route in COMMAND_ROUTES:
        schema = schemas[route.command.__name__]
        schema["properties"].pop("type", None)
        schema["required"] = [name for name in schema["required"] if name != "type"]
    return schemas


def _operation(route: AnyRoute, command: CommandRoute | None, schemas: dict[str, Json]) -> Json:
    described = command.command if command is not None else route.handler
    name = route.path.strip("/").replace("/", "_").replace("-", "_").replace(".", "_").replace("{", "").replace("}", "")
    operation: Json = {
        "operationId": f"{route.method.lower()}_{name}",
        "summary": (inspect.getdoc(described) or "").partition("\n")[0],
        "responses": {"200": _content(_answer(command)), "default": _content(_ref("Error"))},
    }
    if route.scope is not Scope.OPEN:
        operation["security"] = [{"token": []}]
        operation["x-scope"] = route.scope.value
    body = command.command if command is not None and route.method != "GET" else _BODIES.get(route.path)
    if body is not None:
        needed = bool(schemas[body.__name__].get("required"))
        operation["requestBody"] = {
            "required": needed,
            "content": {"application/json": {"schema": _ref(body.__name__)}},
        }
    elif route.method == "GET" and (parameters := _parameters(route, command, schemas)):
        operation["parameters"] = parameters
    return operation


def _parameters(route: AnyRoute, command: CommandRoute | None, schemas: dict[str, Json]) -> list[Json]:
    fields = Viewport if route.path.endswith("/requests") else (command.fields or command.command if command else None)
    if fields is None:
        names = re.findall(r"\{(\w+)\}", route.path)
        return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    properties: dict[str, Json] = schemas[fields.__name__]["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]


def _answer(command: CommandRoute | None) -> Json:
    return _ref(command.answer.__name__) if command is not None else {}


def _content(schema: Json) -> Json:
    described: Json = {"description": "The error." if schema == _ref("Error") else "The answer."}
    return {**described, "content": {"application/json": {"schema": schema}}} if schema else described


def _ref(name: str) -> Json:
    return {"$ref": _REF.format(name=name)}


def _knob_changes(knobs: Sequence[KnobSpec]) -> Json:
    """What `changes` may hold: each knob with its unit, range and meaning."""
    if not knobs:
        return {"type": "object"}
    properties = {knob.name: _knob(knob) for knob in knobs}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _knob(knob: KnobSpec) -> Json:
    schema: Json = {"type": _JSON_TYPES[knob.kind], "description": knob.summary, "default": knob.default}
    bounds = {"minimum": knob.low, "maximum": knob.high, "x-unit": knob.unit or None}
    schema.update({name: value for name, value in bounds.items() if value is not None})
    if knob.choices:
        schema["enum"] = list(knob.choices)
    return schema
