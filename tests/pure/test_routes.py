"""Which rank is whose agent: everybody is reached once, and nobody does more than its share."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fullshard.comm.routes import Routes, circles_of

some_hosts = st.lists(st.sampled_from("abcde"), min_size=2, max_size=24).filter(
    lambda hosts: len(set(hosts)) > 1
)


@given(some_hosts)
def test_every_rank_has_one_agent_on_each_other_host(hosts: list[str]) -> None:
    everyone = [Routes(circles_of(hosts), rank) for rank in range(len(hosts))]
    for routes in everyone:
        assert routes.rank in routes.own and routes.world == len(hosts)
        assert sorted(hosts[agent] for agent in routes.own_agents) == sorted(
            {*hosts} - {hosts[routes.rank]}
        )
        for agent in routes.own_agents:
            assert routes.rank in everyone[agent].outsiders
            assert everyone[agent].agent_of[routes.rank] == agent
        for partner in routes.partners:
            assert routes.rank in everyone[partner].partners


@given(some_hosts)
def test_agents_of_a_host_have_equal_shares(hosts: list[str]) -> None:
    circles = circles_of(hosts)
    for circle in circles:
        shares = Counter(Routes(circles, circle[0]).agent_of.values())
        loads = [shares[rank] for rank in circle]
        assert max(loads) - min(loads) <= 1


def test_hosts_of_equal_size_pair_their_ranks() -> None:
    circles = circles_of("aaaabbbb")
    assert [Routes(circles, rank).partners for rank in range(8)] == [
        (4,), (5,), (6,), (7,), (0,), (1,), (2,), (3,)
    ]  # fmt: skip
