"""The Python API: prompts in, completions out."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from tqdm.auto import tqdm

from pagetide_models import ModelSource, Tokenizer, load_model, open_model
from pagetide_runtime.build import (
    build_engine,
    make_block_manager,
    resolve_device,
    resolve_max_model_len,
)
from pagetide_runtime.completion import Completion, TextChunk
from pagetide_runtime.config import EngineConfig
from pagetide_runtime.detokenizer import Detokenizer
from pagetide_scheduler import FinishReason, SamplingParams, StepOutput

__all__ = ["LLM"]

Prompt = str | Sequence[int]
Message = Mapping[str, str]


class _Active:
    """A request whose text is still growing, and the chunks that its caller has not taken yet."""

    def __init__(
        self, index: int, sample: int, prompt: str | None, detokenizer: Detokenizer
    ) -> None:
        self.index = index
        self.sample = sample
        self.prompt = prompt
        self.detokenizer = detokenizer
        self.chunks: deque[TextChunk] = deque()


class LLM:
    """A model, ready to answer; for one thread at a time.

    Args:
        model: a GGUF file, a folder with config.json, safetensors and tokenizer.json, a Hugging
            Face hub id, or what `pagetide_models.open_model` returned for one of them.
        revision: the hub's branch, tag or commit, where `model` is a hub id.
        progress: whether loading and `generate` show a progress bar on a terminal.
        **options: the fields of `EngineConfig`.

    Raises:
        ModelError: the model cannot be found, read or built (`pagetide_models`).
        ValueError: an option is out of range or does not fit this model or device.

    Example:
        >>> llm = LLM("SmolLM2-135M-Instruct.Q4_1.gguf", kv_dtype="auto")
        >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].text
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | ModelSource,
        *,
        revision: str | None = None,
        progress: bool = True,
        **options: object,
    ) -> None:
        config = _engine_config(options)
        source = model if isinstance(model, ModelSource) else open_model(model, revision=revision)
        resolve_max_model_len(source.config, config)  # refused before any weight is read
        self.tokenizer: Tokenizer = source.load_tokenizer()
        self.config = config
        model_ = load_model(
            source,
            device=str(resolve_device(config.device)),
            dtype=config.dtype,
            attention_backend=config.attention_backend,
            kv_dtype=config.kv_dtype,
            block_size=config.block_size,
            progress=progress,
        )
        self.block_manager = make_block_manager(model_, config)
        self.engine = build_engine(model_, config, self.block_manager)
        self._progress = progress
        self._request_ids = itertools.count()
        self._active: dict[str, _Active] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
    ) -> list[Completion]:
        """Answers every prompt, all in one continuous batch.

        Args:
            prompts: one prompt or several, each text or token ids (a numpy array or a tensor too).
            params: one for all prompts, or one a prompt; None is `SamplingParams()`.
            n: samples of each prompt; with a seed, sample i draws as `seed + i` would.

        Returns:
            `n` completions a prompt, in the prompts' order.

        Raises:
            ValueError: no prompts, an empty one, one that is neither text nor token ids, one that
                can never fit, or not one params a prompt.
            EngineDeadError: the engine failed and cannot be used any more.
        """
        _check_num_samples(n)
        prompts = _as_prompts(prompts)
        completions: list[Completion | None] = [None] * (len(prompts) * n)
        with tqdm(
            total=len(completions), desc="prompts", disable=None if self._progress else True
        ) as bar:
            for chunk in self.stream(prompts, params, n=n):
                if chunk.completion is not None:
                    completions[chunk.index * n + chunk.sample] = chunk.completion
                    bar.update()
        return [completion for completion in completions if completion is not None]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
    ) -> Generator[TextChunk, None, None]:
        """Answers every prompt in one continuous batch and yields text as it becomes certain.

        Closing or dropping the iterator early aborts what has not ended. Raises what `generate`
        raises, before anything is computed; and RuntimeError where a request's answer is lost,
        because it was finished at the engine or an interrupt came as it was delivered.
        """
        _check_num_samples(n)
        prompts = _as_prompts(prompts)
        stream = self._run(prompts, _as_params(params, len(prompts)), n)
        next(stream)  # a generator that was never started would not abort when it is dropped
        return stream

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answers a conversation, put together by the model's own chat template.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first.
            params: the sampling parameters; None is `SamplingParams()`.
        """
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, ready for the assistant's answer.

        The template's own special tokens count as such; those that stand in a message are plain
        text.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        return self.tokenizer.encode_chat(messages)

    def _add(
        self, index: int, prompt: Prompt, params: SamplingParams, n: int
    ) -> dict[str, _Active]:
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        samples = [params]
        if n > 1:
            seed = params.seed
            samples = [
                replace(params, seed=None if seed is None else seed + sample) for sample in range(n)
            ]
        request_ids = [f"request-{next(self._request_ids)}" for _ in samples]
        self.engine.add_samples(request_ids, token_ids, samples)
        strips = self.tokenizer.strips_leading_space
        added = {
            request_id: _Active(
                index,
                sample,
                text,
                Detokenizer(self.tokenizer, params.stop, strips_leading_space=strips),
            )
            for sample, request_id in enumerate(request_ids)
        }
        self._active.update(added)
        return added

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self._active.pop(request_id, None) is not None:
                self.engine.finish(request_id, FinishReason.ABORT)

    def _run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], n: int
    ) -> Generator[TextChunk, None, None]:
        """Yields an empty chunk once all prompts are taken, then what their requests say.

        Steps the engine until these have ended; other callers' chunks wait for them.
        """
        mine: dict[str, _Active] = {}
        try:
            for index, (prompt, wish) in enumerate(zip(prompts, params, strict=True)):
                mine.update(self._add(index, prompt, wish, n))
            yield TextChunk(0, 0, "")
            while mine:
                self._deliver(self.engine.step())
                if not self.engine.has_unfinished and not any(x.chunks for x in mine.values()):
                    raise RuntimeError(
                        f"{len(mine)} of this stream's requests ended without their answers: they "
                        "were finished at the engine, or an interrupt came as these were delivered"
                    )
                for request_id, active in list(mine.items()):
                    while active.chunks:
                        chunk = active.chunks.popleft()
                        if chunk.completion is not None:
                            del mine[request_id]
                        yield chunk
        finally:
            self._abort(mine)

    def _deliver(self, output: StepOutput) -> None:
        """Turns a step's tokens into chunks; a stop string found here ends its request."""
        pieces: dict[str, str] = {}
        ended = {finished.request_id: finished for finished in output.finished}
        for request_id, token_id in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            active = self._active.get(request_id)
            if active is None or active.detokenizer.is_stopped:
                continue
            pieces[request_id] = pieces.get(request_id, "") + active.detokenizer.push(token_id)
            if active.detokenizer.is_stopped:
                stopped = self.engine.finish(
                    request_id, FinishReason.STOP, keep_tokens=active.detokenizer.num_tokens
                )
                if stopped is not None:
                    ended[request_id] = stopped
        for request_id, finished in ended.items():
            active = self._active.pop(request_id, None)
            if active is None:
                continue
            piece = pieces.pop(request_id, "") + active.detokenizer.finish()
            if active.detokenizer.is_stopped:
                finished = replace(finished, finish_reason=FinishReason.STOP)
            completion = Completion(
                active.index, active.sample, active.prompt, active.detokenizer.text, finished
            )
            active.chunks.append(TextChunk(active.index, active.sample, piece, completion))
        for request_id, piece in pieces.items():
            if piece:
                active = self._active[request_id]
                active.chunks.append(TextChunk(active.index, active.sample, piece))


def _engine_config(options: dict[str, object]) -> EngineConfig:
    fields = EngineConfig.__dataclass_fields__
    unknown = ", ".join(sorted(set(options) - set(fields)))
    if unknown:
        raise TypeError(f"LLM has no option {unknown}; it has: {', '.join(sorted(fields))}")
    return EngineConfig(**options)  # type: ignore[arg-type]


def _check_num_samples(n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n={n!r}: give a whole number of at least 1")


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    given = _as_list(prompts)
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise ValueError(f"prompts is {given!r:.80}: give text, token ids, or a list of these")
    several: list[Any] = [item if isinstance(item, str) else _as_list(item) for item in given]
    if not several:
        raise ValueError("prompts=[]: give at least one prompt")
    if all(isinstance(item, Integral) for item in several):
        return [several]
    for number, item in enumerate(several, 1):
        is_ids = isinstance(item, list) and all(isinstance(token, Integral) for token in item)
        if not (is_ids or isinstance(item, str)):
            raise ValueError(f"prompt {number} is {item!r:.80}: give text or whole token ids")
    return several


def _as_list(value: Any) -> Any:
    """An array, a tensor or a sequence as plain Python; whatever else it is, as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    is_plain = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return list(value) if is_plain else value


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(
            f"params has {len(params)} entries for {num_prompts} prompts: "
            "give one for all, or one each"
        )
    return list(params)
