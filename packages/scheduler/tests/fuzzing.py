"""One random run: sizes, arrivals, aborts, failures and preemptions, all from a seed."""

from __future__ import annotations

import random

from harness import Engine, Load

from pagetide_scheduler import FinishReason, Preemption, Request, RequestState, StepPlan


def run_once(seed: int, num_requests: int = 25, **options: object) -> Engine:
    """Runs `num_requests` random requests under random conditions and checks everything."""
    draw = random.Random(seed)
    block_size = draw.choice([1, 2, 3, 4, 16])
    max_prompt = draw.choice([3, 12, 30])
    max_tokens = draw.choice([2, 10, 24])
    needed = -(-(max_prompt + 1) // block_size)
    # Three runs of four have a pool that barely holds the largest request and one more.
    num_blocks = needed + draw.choice([0, 1, needed // 2, needed]) + 1
    if seed % 4 == 0:
        num_blocks += 4 * needed
    bad: set[str] = set()
    failure_rate = draw.choice([0, 0, 0.03])

    def fails(plan: StepPlan) -> bool:
        return not bad.isdisjoint(plan.request_ids) or draw.random() < failure_rate

    engine = Engine(
        num_blocks=num_blocks,
        block_size=block_size,
        overlap=draw.choice([0, 1, 2]),
        seed=seed,
        prefix_cache=draw.random() < 0.8,
        max_num_seqs=draw.choice([1, 2, 5, 16]),
        max_num_batched_tokens=draw.choice([1, 4, 16, 64]),
        max_chunk_tokens=draw.choice([None, 3, 8]),
        admission=draw.choice(["fcfs", "lookahead", "reserve"]),
        lookahead=draw.choice([1, 3, 8]),
        max_skips=draw.choice([1, 4]),
        max_wait_steps=draw.choice([3, 50]),
        num_host_blocks=draw.choice([0, 0, 3, num_blocks, 4 * num_blocks]),
        preemption=draw.choice(["auto", "recompute", "swap"]),
        swap_cost=draw.choice([0.0, 1.0, 4.0]),
        watermark=draw.choice([0.0, 0.01]),
        max_model_len=draw.choice([max_prompt + 1, 60, 10_000]),
        fails=fails,
        **options,
    )
    load = Load(seed, max_prompt)
    forces = draw.random() < 1 / 3
    arrival_rate = draw.choice([0.2, 1.0, 5.0])
    added = 0
    bound = 200
    while added < num_requests or engine.scheduler.has_unfinished or engine.pending:
        while added < num_requests and draw.random() < arrival_rate / (1 + arrival_rate):
            name = f"r{added}"
            priority = draw.choice([0, 0, 0, 1, -1])
            requests: tuple[Request, ...]
            if draw.random() < 0.1:
                count = draw.randint(2, min(4, engine.config.max_num_seqs + 1))
                count = min(count, engine.config.max_num_seqs)
                names = [name, *(f"{name}.{index}" for index in range(1, count))]
                wishes = [load.params(max_tokens) for _ in names]
                requests = engine.add_samples(names, load.prompt(), wishes)
            else:
                wish = load.params(max_tokens)
                requests = (engine.add(name, load.prompt(), wish, priority=priority),)
            if draw.random() < 0.01:
                bad.add(name)
            added += 1
            # Alone it needs a step a token; in company it may start over for each of the others.
            for request in requests:
                length = request.num_prompt_tokens + engine.max_new_tokens(request)
                bound += 12 * length + 20
        _disturb(engine, draw, forces)
        if engine.step() is None and not engine.pending:
            assert not engine.scheduler.has_unfinished, "a step without progress"
        assert engine.num_steps < bound, "a request does not end within its bound"
    engine.check_outputs()
    engine.check_all_returned()
    for name, output in engine.outputs.items():
        if output.finish_reason is FinishReason.ERROR:
            assert name in bad or failure_rate, "an innocent request failed"
    return engine


def _disturb(engine: Engine, draw: random.Random, forces: bool) -> None:
    """Aborts about a tenth of the requests over their lives; forces preemptions in some runs."""
    scheduler = engine.scheduler
    unfinished = [n for n, r in engine.requests.items() if r.state is not RequestState.FINISHED]
    if unfinished and draw.random() < 0.02:
        name = draw.choice(unfinished)
        engine.finish(name, FinishReason.ABORT)
        assert engine.finish(name, FinishReason.ABORT) is None
    if forces and draw.random() < 0.4:
        running = sorted(
            (r for r in engine.requests.values() if r.state is RequestState.RUNNING),
            key=lambda r: r.order,
        )
        for request in running[1:]:  # never the oldest: it carries the proof of progress
            if draw.random() < 0.5:
                way = draw.choice([None, *Preemption])
                assert scheduler.preempt(request.request_id, way)
                scheduler.verify()
