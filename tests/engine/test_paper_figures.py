"""The papers' figures keep their shape on other seeds and loads; step times are modelled: only shapes are compared."""

import random
from itertools import pairwise

from click.testing import CliRunner

from schedtop.cli.charts import WIDTH, chart
from schedtop.cli.sim import figures
from schedtop.engine.sim.figures import Curve, Figure, batching, chunk_size, memory, thrown_away


def seed() -> int:
    return random.randrange(10_000)


def curves(figure: Figure) -> dict[str, list[float]]:
    """The measured values by label."""
    return {curve.label: [y for _, y in curve.points] for curve in figure.curves}


def test_capacity_at_a_fixed_token_gap_has_a_hump_over_the_chunk_size() -> None:
    """Sarathi-Serve: small chunks waste the step's fixed cost, large ones stretch the gaps."""
    (capacity,) = curves(chunk_size(seed(), chunks=(64, 1024, 8192), horizon_s=10.0)).values()
    small, middle, large = capacity
    assert middle > 1.5 * small and middle > 1.5 * large


def test_batches_formed_per_iteration_beat_batches_of_whole_requests_by_more_the_higher_the_load() -> None:
    """Orca: who has ended makes room at once, and who comes need not wait for the longest of the batch."""
    drawn = curves(batching(seed(), rates=(0.5, 4.0, 20.0), horizon_s=15.0))
    ratios = [slow / fast for fast, slow in zip(drawn["iteration level"], drawn["request level"], strict=True)]
    assert ratios[0] < 1.6 < ratios[-1] and ratios[1] > ratios[0]


def test_paged_memory_carries_loads_that_reservations_for_the_longest_answer_do_not() -> None:
    """PagedAttention: what is reserved and never used is room that others wait for."""
    drawn = curves(memory(seed(), rates=(1.0, 12.0), horizon_s=12.0))
    paged, reserved = drawn["paged"], drawn["reserved for what was asked for"]
    assert reserved[0] < 1.5 * paged[0], "nobody waits at a low load"
    assert reserved[1] > 4 * paged[1]
    assert drawn["reserved for the real length"][1] < reserved[1] / 2, "who knew the length would lose little"


def test_small_pools_throw_tokens_away_large_ones_none_and_the_victim_rule_matters() -> None:
    first = seed()
    draws = [curves(thrown_away(first + n, pools=(500, 4000), num_requests=32)) for n in range(6)]
    for drawn in draws:
        assert tuple(drawn) == ("newest", "least_computed", "most_blocks")
        assert all(values[0] > 0.2 and values[-1] == 0 for values in drawn.values())
    least, most = (sum(drawn[rule][0] for drawn in draws) for rule in ("least_computed", "most_blocks"))
    assert least < most, "whoever has computed least has least to lose"


def test_charts_draw_longer_bars_for_larger_values() -> None:
    figure = Figure(
        name="f", title="Title", x="a", y="b", curves=[Curve(label="c", points=[(1, 1.0), (2, 2.0), (3, 4.0)])]
    )
    lines = chart(figure)
    assert lines[:3] == ["Title", "a -> b", "  c"]
    bars = [line.count("#") for line in lines[3:]]
    assert bars == [WIDTH // 4, WIDTH // 2, WIDTH] and all(a < b for a, b in pairwise(bars))


def test_the_command_draws_one_figure_or_gives_its_points() -> None:
    drawn = CliRunner().invoke(figures, ["thrown-away"])
    assert drawn.exit_code == 0 and "most_blocks" in drawn.output and "#" in drawn.output
    assert CliRunner().invoke(figures, ["thrown-away", "--json"]).output.startswith('[{"name":"thrown-away"')
