"""Who is tested with whom: pairs of a dispatcher and a runner of one format, and pairs for quantized tokens."""

from __future__ import annotations

from collections.abc import Iterable

from moe_core.declared import Candidate, DeclaredDispatcher, DeclaredRunner, DeclaredSpec
from moe_core.specs import TokenDtype


def serves_one_rank(pair: Candidate) -> bool:
    """Whether no limit asks for several expert-parallel ranks."""
    parts = (pair.dispatcher, pair.runner) if pair.dispatcher else (pair.runner,)
    return all(limit.allows(1) for part in parts for limit in part.spec.limits if limit.field == "ep_size")


def pairs_of(own: tuple[DeclaredSpec, ...], others: tuple[DeclaredSpec, ...]) -> list[Candidate]:
    """The pairs of one format with at least one part of the plugin under test.

    Parts of other plugins help out: a dispatcher for a runner that has none of its own for one rank, and one runner for
    a dispatcher that has none.
    """
    dispatchers, runners = _by_kind(own)
    found = [Candidate(None, runner) for runner in runners if runner.spec.format == "fused"]
    found += _joined(dispatchers, runners)
    alone = [runner for runner in runners if not any(p.runner == runner and serves_one_rank(p) for p in found)]
    helping_dispatchers, helping_runners = _by_kind(others)
    helped = _joined(helping_dispatchers, alone)
    found += [pair for pair in helped if serves_one_rank(pair) and _share_tokens(pair)]
    for dispatcher in dispatchers:
        if all(pair.dispatcher != dispatcher for pair in found):
            found += [pair for pair in _joined([dispatcher], helping_runners) if _share_tokens(pair)][:1]
    return found


def _by_kind(
    parts: Iterable[DeclaredSpec],
) -> tuple[list[DeclaredDispatcher], list[DeclaredRunner]]:
    listed = list(parts)
    dispatchers = [part for part in listed if isinstance(part, DeclaredDispatcher)]
    return dispatchers, [part for part in listed if isinstance(part, DeclaredRunner)]


def _joined(dispatchers: Iterable[DeclaredDispatcher], runners: Iterable[DeclaredRunner]) -> list[Candidate]:
    pairs = [Candidate(dispatcher, runner) for dispatcher in dispatchers for runner in runners]
    return [pair for pair in pairs if pair.has_one_format]


def _share_tokens(pair: Candidate) -> bool:
    return pair.dispatcher is None or not set(pair.runner.spec.reads).isdisjoint(pair.dispatcher.spec.sends)


def wire_tokens(part: DeclaredSpec) -> list[TokenDtype]:
    """The quantized tokens that a dispatcher sends or a runner reads."""
    listed = part.spec.reads if isinstance(part, DeclaredRunner) else part.spec.sends
    return [token for token in listed if token.scales != "none"]


def uses(pairs: Iterable[Candidate], part: DeclaredSpec, token: TokenDtype) -> bool:
    """Whether some pair with `part` runs with tokens of `token`; a pin names the first of several scale layouts."""
    for pair in pairs:
        if part not in (pair.dispatcher, pair.runner):
            continue
        sent = pair.dispatcher.spec.sends if pair.dispatcher else pair.runner.spec.reads
        shared = [other for other in pair.runner.spec.reads if other in sent and other.dtype == token.dtype]
        if shared[:1] == [token]:
            return True
    return False


def wire_pairs_of(
    own: Iterable[DeclaredSpec],
    pairs: Iterable[Candidate],
    helpers: Iterable[DeclaredSpec],
) -> list[Candidate]:
    """Pairs of `own` with `helpers` for every declared quantized token dtype that `pairs` do not use.

    Args:
        own: The parts under test.
        pairs: What is tested anyway.
        helpers: Dispatchers and runners of one token dtype each.
    """
    known, (senders, readers) = list(pairs), _by_kind(helpers)
    found: list[Candidate] = []
    for part in own:
        for token in wire_tokens(part):
            if uses(known, part, token):
                continue
            joined = _joined(senders, [part]) if isinstance(part, DeclaredRunner) else _joined([part], readers)
            found += [pair for pair in joined if uses([pair], part, token)]
    return found
