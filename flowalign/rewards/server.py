"""Judges behind HTTP, so that one with hostile pins lives in an environment of its own.

``GET /healthz``; ``GET /v1/rewards`` (specs, digests, limits); ``GET /v1/metrics``; ``POST /v1/score`` (see
`flowalign.rewards.wire`). Errors are JSON ``{"error": sentence}``: 400 no valid request, 401 no or a wrong token, 403
another name of this machine, 404 no such judge, 408 a body too slow, 409 another judge than meant, 413 too large, 415
another content type, 429 busy, 500 the judge failed, 503 stopping; 429 and 503 come with Retry-After.

A request holds memory that is counted from the first byte of its body to its answer; beyond ``max_queue_bytes`` new
ones are refused. On top of that, two bodies at a time are decoded, and each judge has one batch in float32.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from flowalign.rewards import registry, wire
from flowalign.rewards.judge import Judge
from flowalign.rewards.service import Service, as_json
from flowalign.types import FlowAlignError

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response


def app(
    judges: Mapping[str, Judge],
    *,
    token: str | None = None,
    any_host: bool = False,
    max_body_bytes: int = 64 << 20,
    max_samples: int = 1024,
    max_queue: int = 64,
    max_queue_bytes: int = 512 << 20,
    max_batch: int = 32,
    batch_wait_ms: float = 5.0,
    body_timeout: float = 60.0,
) -> FastAPI:
    """The web application; `serve` runs it with the deadlines of connections that it needs against slow clients.

    Args:
        judges: by the name that clients use.
        token: what clients must send as ``Authorization: Bearer``; None = nothing.
        any_host: without a token, answer to any name of this machine; else to localhost and addresses in numbers.
        max_body_bytes, max_samples: of a request; see `wire.Limits`.
        max_queue: requests that may wait for a judge.
        max_queue_bytes: that all requests may hold together.
        max_batch: samples of several requests that are scored together; 1 = requests are never merged.
        batch_wait_ms: how long a request waits for others.
        body_timeout: seconds that a body may take to come.

    Raises:
        FlowAlignError: fastapi is missing, or the token is empty.
    """
    try:
        from fastapi import FastAPI
        from starlette.exceptions import HTTPException
    except ImportError:
        raise FlowAlignError("rewards serve: needs fastapi; pip install 'flowalign[server]'") from None
    batching = {
        "max_queue": max_queue,
        "max_batch": max_batch,
        "wait": batch_wait_ms / 1000,
        "max_bytes": max_body_bytes,
    }
    limits = wire.Limits(max_body_bytes, max_samples)
    service = Service(judges, token, any_host, limits, max_queue_bytes, body_timeout, batching)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return as_json({"error": "no such path, or no such method here; see GET /v1/rewards"}, status)

    # No pages of documentation: they are not needed, and load scripts from elsewhere.
    made = FastAPI(title="flowalign rewards", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    made.router.redirect_slashes = False
    made.state.service = service
    made.add_exception_handler(HTTPException, unknown)
    made.add_route("/healthz", service.health, ["GET"])
    made.add_route("/v1/rewards", service.rewards, ["GET"])
    made.add_route("/v1/metrics", service.metrics, ["GET"])
    made.add_route("/v1/score", service.score, ["POST"])
    return made


def serve(
    names: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    params: Mapping[str, Mapping[str, Any]] | None = None,
    device: str = "cpu",
    allow_public: bool = False,
    batch_size: int = 32,
    grace: float = 30.0,
    **limits: Any,
) -> None:
    """Loads judges and answers requests until SIGTERM or SIGINT: then what has begun is finished, and no more begun.

    Args:
        names: see `flowalign.rewards.registry.load`; clients use the same.
        port: 0 = any that is free; the line that says "serving" names it.
        params: {name: parameters of its constructor}.
        allow_public: listen to other machines without a token.
        batch_size: media, of image judges frames, that a judge sees at a time.
        grace: seconds for what has begun.
        limits: see `app`.

    Raises:
        FlowAlignError: a judge that cannot be made, an address that is taken or open to everybody, or requests that
            were not finished within ``grace``.
    """
    try:
        from flowalign.rewards import listening
    except ImportError as error:
        raise FlowAlignError(f"rewards serve: needs uvicorn ({error}); pip install 'flowalign[server]'") from None
    listening.check_host(host, token, allow_public)
    with listening.bind(host, port) as bound:
        own = params or {}
        judges = {name: registry.create(name, device, batch_size, **own.get(name, {})) for name in dict.fromkeys(names)}
        application = app(judges, token=token, any_host=allow_public, **limits)
        listening.run(application, application.state.service, bound, f"serving {', '.join(judges)} on", grace)
