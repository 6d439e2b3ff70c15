import pytest
from harness import Engine, Load
from pagetide_scheduler import SamplingParams


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_small(overlap):
    e = Engine(
        num_blocks=12, block_size=4, overlap=overlap, max_num_seqs=6, max_num_batched_tokens=16
    )
    load = Load(1, 20)
    for i in range(60):
        e.add(f"r{i}", load.prompt(), load.params(20))
    e.run()
    e.check_outputs()
    e.check_all_returned()
    print(e.num_preemptions, e.num_steps)
