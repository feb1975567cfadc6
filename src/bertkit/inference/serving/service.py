"""Answers to requests: the choice of model, the limits, the work of a request, and its answer.

Not from a paper. Siblings: batcher.py computes, app.py defines the routes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
from scipy.sparse import vstack

from bertkit.arrays import Float32Array
from bertkit.errors import DataError, UsageError
from bertkit.inference.serving.batcher import Batcher, QueueFullError
from bertkit.inference.serving.errors import RequestError
from bertkit.inference.serving.metrics import ServerMetrics
from bertkit.inference.serving.requests import (
    EmbeddingRequest,
    FillRequest,
    PredictRequest,
    RerankRequest,
    SparseRequest,
)
from bertkit.inference.serving.served import ROUTES, Ability, ServedModel, Work, WorkKind, similarities
from bertkit.inference.serving.settings import ServeSettings
from bertkit.inference.sparse_vectors import weights_by_word
from bertkit.models.late_interaction import score

log = logging.getLogger(__name__)

_WRITTEN_APART = 1 << 15
"""Answers with at least this many numbers are written as JSON by a thread, so that other requests need not wait."""
MOST_CANDIDATES = 100_000
"""Maximum number of tokens with probabilities per request for masks: some ten megabytes."""
_UNIT = 1e-3
"""A vector whose length differs from one by less than this counts as a unit vector."""


class Service:
    """The state that all requests share.

    Args:
        models: in the order given on the command line.
        settings: the limits.

    Attributes:
        draining: whether the server is about to stop.
    """

    def __init__(self, models: Sequence[ServedModel], settings: ServeSettings) -> None:
        self.models = {each.name: each for each in models}
        self.settings = settings
        self.draining = False
        self.batcher = Batcher(
            self._compute,
            batch_tokens=min(each.model.batch_tokens for each in models),
            wait_seconds=settings.wait_ms / 1000,
            queue_tokens=settings.queue_tokens,
            observe=lambda report: self.metrics.observe_batch(report),
        )
        self.metrics = ServerMetrics(lambda: self.batcher.waiting_tokens)
        self._tokeniser = ThreadPoolExecutor(1, "tokenizer")
        self._in_work = 0
        self._cut_by = set[str]()

    @asynccontextmanager
    async def running(self) -> Any:
        """Run the threads; on exit, everything in the queue is computed."""
        self.batcher.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.batcher.stop)
            self._tokeniser.shutdown()

    async def embeddings(self, request: EmbeddingRequest) -> bytes:
        """The body of an answer in OpenAI's format."""
        model, work, vectors = await self._embedded(request, "embed")
        vectors_NE = np.stack(vectors)
        if request.dimensions is not None:
            vectors_NE = shortened(vectors_NE, request.dimensions)
        document = {"model": model.name, "usage": _usage(work)}
        as_text = request.encoding_format == "base64"
        if vectors_NE.size < _WRITTEN_APART:
            return embeddings_body(document, vectors_NE, as_base64=as_text)
        return await asyncio.to_thread(embeddings_body, document, vectors_NE, as_base64=as_text)

    async def sparse_embeddings(self, request: SparseRequest) -> bytes:
        """The body of an answer with the weights of words that `bertkit embed` prints."""
        model, work, vectors = await self._embedded(request, "embed_sparse")

        def written() -> bytes:
            weights = weights_by_word(vstack(vectors, format="csr"), model.model.vocabulary_words)
            data = [{"object": "embedding", "index": n, "vector": vector} for n, vector in enumerate(weights)]
            document = {"object": "list", "data": data, "model": model.name, "usage": _usage(work)}
            return json.dumps(document, separators=(",", ":")).encode()

        return await asyncio.to_thread(written)

    async def _embedded(self, request: SparseRequest, ability: Ability) -> tuple[ServedModel, Work, list[Any]]:
        """The model of a request, its work and the vectors of its input."""
        model = self._model(request.model, ability)
        given = request.input
        is_one = isinstance(given, str) or isinstance(given[0], int)
        texts: list[Any] = [given] if is_one else list(given)
        if any(not text and not isinstance(text, str) for text in texts):
            raise RequestError(422, "input: a list of token ids is empty", code="invalid_value", param="input")
        make = partial(model.embed_work, prompt=_prompt(model, request.prompt_name))
        return model, *await self._done(model, ability, "input", texts, make)

    async def predictions(self, request: PredictRequest) -> dict[str, Any]:
        """The documents printed by `bertkit predict`."""
        model = self._model(request.model, "predict")
        inputs = [request.inputs] if isinstance(request.inputs, str) else list(request.inputs)
        work, found = await self._done(model, "predict", "inputs", inputs, model.predict_work, request.top)
        return {"model": model.name, "predictions": found, "usage": _usage(work)}

    async def reranked(self, request: RerankRequest) -> dict[str, Any]:
        """The indices of the documents with their scores, best first."""
        model = self._model(request.model, "rerank")
        documents = request.texts
        texts = [request.query, *documents]
        if model.compares_tokens:
            work, vectors = await self._done(model, "rerank", "documents", texts, model.token_work, place=_of_ranking)
            scores = [score(vectors[0], each) for each in vectors[1:]]
        elif "embed" in model.abilities:
            make = partial(model.ranking_work, place=_of_ranking)
            work, vectors = await self._done(model, "embed", "documents", texts, make, place=_of_ranking)
            scores = similarities(vectors[0], np.stack(vectors[1:]), model.model.embedder.similarity)
        elif "embed_sparse" in model.abilities:
            make = partial(model.ranking_work, place=_of_ranking)
            work, vectors = await self._done(model, "embed_sparse", "documents", texts, make, place=_of_ranking)
            scores = [float((vectors[0] @ each.T).sum()) for each in vectors[1:]]
        else:
            rows = [{"text": request.query, "text_pair": each} for each in documents]
            work, found = await self._done(model, "predict", "documents", rows, model.predict_work)
            blank = next((number for number, each in enumerate(found) if each["prediction"] is None), None)
            if blank is not None:
                raise RequestError(
                    422, f"documents.{blank}: blank, as is the query", code="invalid_value", param="documents"
                )
            scores = [each["prediction"] for each in found]
        order = sorted(range(len(documents)), key=lambda number: (-scores[number], number))[: request.top_n]
        results = [
            {"index": number, "relevance_score": scores[number]}
            | ({"document": {"text": documents[number]}} if request.return_documents else {})
            for number in order
        ]
        return {"model": model.name, "results": results, "usage": _usage(work)}

    async def filled(self, request: FillRequest) -> dict[str, Any]:
        """The documents printed by `bertkit fill`."""
        model = self._model(request.model, "fill")
        texts = [request.input] if isinstance(request.input, str) else list(request.input)
        candidates = request.top * sum(text.count(model.model.mask_token) for text in texts)
        if candidates > MOST_CANDIDATES:
            raise RequestError(
                422,
                f"input: {candidates:,} candidates for its masks, but a request gets at most {MOST_CANDIDATES:,};"
                " lower top, or send several requests",
                code="too_many_candidates",
                param="input",
            )
        work, found = await self._done(model, "fill", "input", texts, model.fill_work, request.top)
        return {"model": model.name, "results": found, "usage": _usage(work)}

    def _model(self, name: str | None, ability: Ability) -> ServedModel:
        able = [each for each in self.models.values() if ability in each.abilities]
        if name is None and len(able) == 1:
            return able[0]
        names = ", ".join(each.name for each in able) or "none of the served models"
        if name is None and not able:
            message = f"none of the served models answers {ROUTES[ability]}; /v1/models lists what each one answers"
            raise RequestError(422, message, code="model_not_able", param="model")
        if name is None:
            raise RequestError(
                422, f"model: is missing; {ROUTES[ability]} is answered by {names}", code="missing", param="model"
            )
        if name not in self.models:
            raise RequestError(
                404,
                f"the model {name!r:.200} is not served here; {ROUTES[ability]} is answered by {names}",
                code="model_not_found",
                param="model",
            )
        if (found := self.models[name]) not in able:
            raise RequestError(
                422,
                f"{name} does not answer {ROUTES[ability]}, only"
                f" {', '.join(ROUTES[each] for each in ROUTES if each in found.abilities)}; it is answered by {names}",
                code="model_not_able",
                param="model",
            )
        return found

    async def _done(
        self,
        model: ServedModel,
        ability: Ability,
        param: str,
        inputs: list[Any],
        make: Callable[[list[Any]], Work],
        top: int | None = None,
        place: Callable[[int], str] | None = None,
    ) -> tuple[Work, list[Any]]:
        """The work of a request and its results.

        Args:
            model: computes them.
            ability, top: the kind of work.
            param: the field with the inputs.
            inputs: to compute.
            make: makes the work of the inputs.
            place: the field of an input by its number; None: its place in `param`.

        Raises:
            RequestError: the request exceeds a limit, or is faulty.
        """
        if len(inputs) > self.settings.max_inputs:
            raise RequestError(
                422,
                f"{param}: {len(inputs):,} texts, but a request may have at most {self.settings.max_inputs:,}; send"
                " several requests",
                code="too_many_inputs",
                param=param,
            )
        if self._in_work >= self.settings.queue_requests:
            raise self._busy(self.batcher.retry_seconds(), f"{self._in_work:,} requests are in work")
        self._in_work += 1
        try:
            loop = asyncio.get_running_loop()
            work = await loop.run_in_executor(self._tokeniser, make, inputs)
            self._check(work, param, ability, place or (lambda number: f"{param}.{number}"))
            self._note_cut(model.name, work)
            results = await self.batcher.submit(WorkKind(model.name, ability, top), work.items, work.tokens)
        except QueueFullError as full:
            raise self._busy(full.retry_seconds, f"{self.batcher.waiting_tokens:,} tokens are waiting") from full
        except (DataError, UsageError) as error:
            own_fault, message = model.blame(error)
            status, code = (500, "model_fault") if own_fault else (422, "invalid_value")
            raise RequestError(status, message, code=code, param=None if own_fault else param) from error
        finally:
            self._in_work -= 1
        return work, results

    def _check(self, work: Work, param: str, ability: Ability, place: Callable[[int], str]) -> None:
        tokens = sum(work.tokens)
        if tokens > self.settings.max_request_tokens:
            raise RequestError(
                422,
                f"{param}: {tokens:,} tokens, but a request may have at most {self.settings.max_request_tokens:,}; send"
                " several requests",
                code="too_many_tokens",
                param=param,
            )
        if ability in ("embed", "embed_sparse", "rerank") and self.settings.long == "error":
            for number, each in enumerate(work.items):
                if each.cut:
                    whole = len(each.ids) + each.cut
                    raise RequestError(
                        422,
                        f"{place(number)}: {whole:,} tokens, the model reads at most {len(each.ids):,}; shorten it",
                        code="context_length_exceeded",
                        param=place(number).partition(".")[0],
                    )

    def _note_cut(self, name: str, work: Work) -> None:
        """Log once per model that texts are cut; each answer counts its own."""
        if work.cut and name not in self._cut_by:
            self._cut_by.add(name)
            log.warning(
                "%s: texts longer than the model reads are cut; usage.truncated_inputs of each answer counts them", name
            )

    def _busy(self, retry_seconds: int, why: str) -> RequestError:
        return RequestError(
            429, f"{why}; try again in {retry_seconds} s", code="server_busy", retry_seconds=retry_seconds
        )

    def _compute(self, kind: WorkKind, items: list[Any]) -> list[Any]:
        return self.models[kind.model].compute(kind, items)


def shortened(vector_NE: Float32Array, dimensions: int) -> Float32Array:
    """The first numbers of vectors (Kusupati et al. 2022, Matryoshka, arXiv:2205.13147); unit vectors are scaled to
    unit length again, as in OpenAI's API.

    Raises:
        RequestError: the vectors have fewer numbers.
    """
    width = vector_NE.shape[1]
    if dimensions > width:
        raise RequestError(
            422, f"dimensions: {dimensions}, the model's vectors have {width}", code="invalid_value", param="dimensions"
        )
    kept = vector_NE[:, :dimensions]
    lengths = np.linalg.norm(kept, axis=-1, keepdims=True)
    is_unit = (np.abs(np.linalg.norm(vector_NE, axis=-1, keepdims=True) - 1) < _UNIT) & (lengths > 0)
    scaled: Float32Array = np.divide(kept, lengths, out=kept.copy(), where=np.broadcast_to(is_unit, kept.shape))
    return scaled


def embeddings_body(document: dict[str, Any], vector_NE: Float32Array, *, as_base64: bool) -> bytes:
    """OpenAI's list of embeddings as JSON."""
    little = vector_NE.astype("<f4", copy=False)
    written: list[Any] = (
        [base64.b64encode(row.tobytes()).decode("ascii") for row in little] if as_base64 else little.tolist()
    )
    data = [{"object": "embedding", "index": number, "embedding": each} for number, each in enumerate(written)]
    return json.dumps({"object": "list", "data": data, **document}, separators=(",", ":")).encode()


def _prompt(model: ServedModel, name: str | None) -> str | None:
    """A model's prompt by name.

    Raises:
        RequestError: the model has no such prompt.
    """
    if name is None:
        return None
    try:
        return model.model.embedder.reading.named(name)
    except UsageError as error:
        raise RequestError(422, f"prompt_name: {error}", code="invalid_value", param="prompt_name") from error


def _of_ranking(number: int) -> str:
    """The field of a text of a request to rank: the query, then the documents."""
    return f"documents.{number - 1}" if number else "query"


def _usage(work: Work) -> dict[str, int]:
    tokens = sum(work.tokens)
    return {"prompt_tokens": tokens, "total_tokens": tokens, "truncated_inputs": work.cut}
