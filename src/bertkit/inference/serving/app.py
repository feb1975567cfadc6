"""The routes of `bertkit serve` and the application that answers them.

FastAPI generates the OpenAPI pages (`/docs`, `/openapi.json`) from the bodies in requests.py; service.py computes the
answers. No route takes a path or a URL, so a request reaches only the served models and nothing else on the machine.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from bertkit import __version__
from bertkit.errors import DataError
from bertkit.files import finite
from bertkit.inference.serving.errors import RequestError, internal_error
from bertkit.inference.serving.guard import Application, Guard
from bertkit.inference.serving.metrics import CONTENT_TYPE
from bertkit.inference.serving.requests import (
    EmbeddingRequest,
    FillRequest,
    PredictRequest,
    RerankRequest,
    SparseRequest,
)
from bertkit.inference.serving.served import ROUTES, ServedModel
from bertkit.inference.serving.service import Service
from bertkit.inference.serving.settings import ServeSettings
from bertkit.json_input import parse_json
from bertkit.visible import visible

_OTHER = "other"
"""In the metrics: paths that are not routes of the server."""
_SHOWN_ERRORS = 3
_UNKNOWN = "unknown field; /docs lists those of each address"

_DESCRIPTION = "Vectors, labels, rankings and filled masks from encoder models. Errors have the shape of OpenAI's."
_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The body is not JSON."},
    404: {"description": "The model is not served here."},
    408: {"description": "The body did not arrive in time."},
    413: {"description": "The body is too large."},
    422: {"description": "The request is JSON of the wrong shape, or exceeds a limit on texts or tokens."},
    429: {"description": "Too many requests are waiting; `Retry-After` gives the seconds to wait."},
}


class _BoundedJsonRequest(Request):
    """A request whose body is parsed within limits on depth, numbers and Unicode."""

    async def json(self) -> Any:
        try:
            return parse_json(await self.body(), "the body", finite=True)
        except DataError as error:
            raise RequestError(400, str(error), code="invalid_json") from error


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_BoundedJsonRequest(request.scope, request.receive))

        return handle


def build_app(models: Sequence[ServedModel], settings: ServeSettings) -> tuple[Application, Service]:
    """The ASGI application of these models, and the state that its requests share."""
    service = Service(models, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    api = FastAPI(
        title="bertkit serve",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
    )
    api.router.route_class = _Route
    _add_errors(api)
    _add_models(api, service)
    _add_answers(api, service)
    known = {*(route.path for route in api.routes if hasattr(route, "path"))}
    guard = Guard(
        api,
        service.metrics,
        max_body_bytes=round(settings.max_body_mb * 1_000_000),
        body_seconds=settings.client_seconds,
        is_draining=lambda: service.draining,
        address_of=lambda path: path if path in known else _OTHER,
    )
    return guard, service


def _add_models(api: FastAPI, service: Service) -> None:
    started = int(time.time())

    def card(model: ServedModel) -> dict[str, Any]:
        answers = [ROUTES[each] for each in ROUTES if each in model.abilities]
        return {"id": model.name, "object": "model", "created": started, "owned_by": "bertkit", "answers": answers}

    @api.get("/health", summary="Whether the server is working")
    @api.head("/health", include_in_schema=False)  # as monitors ask
    async def health() -> JSONResponse:
        status = "stopping" if service.draining else "ok" if service.batcher.is_alive else "failed"
        return JSONResponse(
            {"status": status, "models": list(service.models)}, status_code=200 if status == "ok" else 503
        )

    @api.get("/metrics", summary="Counters in Prometheus' format")
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE)

    @api.get("/v1/models", summary="The served models and what each one answers")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(each) for each in service.models.values()]}

    @api.get("/v1/models/{name:path}", summary="One served model")
    async def model(name: str) -> dict[str, Any]:
        if name not in service.models:
            raise RequestError(
                404, f"the model {name!r:.200} is not served here", code="model_not_found", param="model"
            )
        return card(service.models[name])


def _add_answers(api: FastAPI, service: Service) -> None:
    @api.post("/v1/embeddings", summary="Vectors of texts, as in OpenAI's API", responses=_REFUSALS)
    async def embeddings(request: EmbeddingRequest) -> Response:
        return Response(await service.embeddings(request), media_type="application/json")

    @api.post("/v1/sparse-embeddings", summary="Weights of words, from a SPLADE model", responses=_REFUSALS)
    async def sparse_embeddings(request: SparseRequest) -> Response:
        return Response(await service.sparse_embeddings(request), media_type="application/json")

    @api.post("/predict", summary="Labels, entities or answers, as from `bertkit predict`", responses=_REFUSALS)
    async def predict(request: PredictRequest) -> JSONResponse:
        return JSONResponse(finite(await service.predictions(request)))

    @api.post("/rerank", summary="Rank documents by their relevance to a query", responses=_REFUSALS)
    @api.post("/v1/rerank", include_in_schema=False)
    async def rerank(request: RerankRequest) -> JSONResponse:
        return JSONResponse(await service.reranked(request))

    @api.post("/fill", summary="The most probable tokens for masks, as from `bertkit fill`", responses=_REFUSALS)
    async def fill(request: FillRequest) -> JSONResponse:
        return JSONResponse(await service.filled(request))


def _add_errors(api: FastAPI) -> None:
    @api.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return error.response()

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _invalid(error, request.headers.get("content-type", "")).response()

    @api.exception_handler(404)
    async def unknown(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestError):  # handlers by status take precedence over those by class
            return error.response()
        return RequestError(404, "there is no such address; /docs lists them", code="not_found").response()

    @api.exception_handler(405)
    async def other_method(request: Request, error: Exception) -> Response:
        response = RequestError(
            405, "this address takes another method; see /docs", code="method_not_allowed"
        ).response()
        response.headers.update(getattr(error, "headers", None) or {})
        return response

    @api.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return internal_error().response()


def _invalid(error: RequestValidationError, content_type: str) -> RequestError:
    """The first faults of a body, by field or item; nothing of the body is repeated except field names."""
    if "json" not in content_type and any(tuple(each["loc"]) == ("body",) for each in error.errors()):
        message = "the body: is read as JSON only with the header content-type: application/json; send this header"
        return RequestError(422, message, code="invalid_request")
    found: dict[str, list[dict[str, Any]]] = {}
    for each in error.errors():
        place = [part for part in each["loc"] if part != "body"]
        # After the field come the members of a union that were tried; clients know only the field.
        name = visible(".".join(str(part) for part in place[:1])[:100]) or "the body"
        found.setdefault(name, []).append(each)
    faults = [_fault(name, errors) for name, errors in found.items()]
    more = f"; and {len(faults) - _SHOWN_ERRORS} more" if len(faults) > _SHOWN_ERRORS else ""
    first = next(iter(found), None)
    param = None if first == "the body" else first
    return RequestError(422, "; ".join(faults[:_SHOWN_ERRORS]) + more, code="invalid_request", param=param)


def _fault(name: str, errors: Sequence[dict[str, Any]]) -> str:
    """What is wrong with a field. Of the members of a union that were tried, those that fit best are named: the ones
    whose type was right, else those that name an item of the list."""
    fitting = [each for each in errors if not each["type"].endswith("_type")]
    fitting = fitting or [each for each in errors if _item(each) is not None] or list(errors)
    item = _item(fitting[0])
    said = (_UNKNOWN if each["type"] == "extra_forbidden" else visible(str(each["msg"])[:200]) for each in fitting)
    return f"{name}{'' if item is None else f'.{item}'}: {', or '.join(list(dict.fromkeys(said))[:_SHOWN_ERRORS])}"


def _item(error: dict[str, Any]) -> int | None:
    return next((part for part in error["loc"] if isinstance(part, int)), None)
