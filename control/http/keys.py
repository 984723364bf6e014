"""Typed keys under which a request carries what middlewares found out about it."""

from aiohttp import web

from schedtop.control.http.auth import Caller

CALLER = web.RequestKey("caller", Caller)
