"""Build the radix cache for `--radix-cache-backend kvhub`.

Whatever is wrong here (settings, mapper, model, hooks), the server starts and
serves as plain SGLang; the reason is in its log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.registry import create_unified_radix_cache

from kvhub import __version__
from kvhub.artifact.evidence import read_evidence
from kvhub.errors import KvhubError
from kvhub.evaluation.gate import rejudge
from kvhub.exchange import DirectoryExchange, Exchange
from kvhub.exchange.shards import HeadSlice, ShardedExchange
from kvhub.mapper.load import load_mapper
from kvhub.mapper.narrow import narrow
from kvhub.model.fingerprint import weights_revision
from kvhub.model.identify import identify
from kvhub.model.identity import ModelIdentity
from kvhub.model.load import resolve
from kvhub.serving.cost import CostModel
from kvhub_kernels.resident import Resident
from kvhub_sglang import hooks
from kvhub_sglang.cache import KvhubRadixCache
from kvhub_sglang.calibrate import calibrate
from kvhub_sglang.internal import InternalRequests
from kvhub_sglang.ranks import Ranks
from kvhub_sglang.refusal import Code, Refusal
from kvhub_sglang.report import Metrics, logger
from kvhub_sglang.serving import Candidate, Serving
from kvhub_sglang.settings import ServedMapper, ServingSettings, load_settings
from kvhub_sglang.supported import refused_configuration, refused_pool, refused_rotary, refused_weights
from kvhub_sglang.tensor_parallel import heads_of, join, open_ranks, publishes
from kvhub_sglang.together import on_all
from kvhub_sglang.watch import Watch


def create(ctx: Any) -> Any:
    """The cache for one scheduler process; ctx is SGLang's `TreeCacheBuildContext`."""
    cache = create_unified_radix_cache(ctx, cache_class=KvhubRadixCache)
    ranks: Ranks | None = None
    try:
        ranks = open_ranks(ctx)  # on every rank, whatever is refused below
        serving = on_all(ranks, lambda: open_serving(ctx, ranks))
        join(serving)
    except (Refusal, KvhubError) as error:
        stay_off(cache, ctx, ranks, str(error))
        logger.error("kvhub is off: %s", error)
        return cache
    except Exception as error:
        stay_off(cache, ctx, ranks, f"{type(error).__name__} at start")
        logger.exception("kvhub is off: unexpected error at start")
        return cache
    cache.serve(serving)
    pool = cache.pool
    for candidate in serving.candidates:
        engine = candidate.mapper.engine(pool.device)
        logger.info("kvhub applies mapper %s with %s", candidate.digest[:12], engine)
        try:
            calibrate(serving.cost, candidate, pool)
        except Exception:  # then its cost is not known, and it is not used but by `worth: always`
            logger.exception("kvhub could not time mapper %s", candidate.digest[:12])
    try:
        cache.watch = Watch(serving)
        cache.watch.start()
    except KvhubError as error:
        logger.warning("kvhub does not watch for withdrawn mappers: %s", error)
    hooks.watch_weights(cache.switch_off)
    serving.metrics.serving(
        version=__version__,
        model=serving.identity.name,
        identity=serving.digest,
        reuse=serving.settings.reuse,
        max_hops=serving.settings.max_hops,
        mappers=[(c.digest, c.source.name, c.draft) for c in serving.candidates],
    )
    logger.info(
        "kvhub serves %s (identity %s): %d mapper(s), reuse %s, max hops %d, exchange %s",
        serving.identity.name,
        serving.digest[:12],
        len(serving.candidates),
        serving.settings.reuse,
        serving.settings.max_hops,
        serving.settings.exchange,
    )
    if serving.ranks.size > 1:
        logger.info("kvhub on %d ranks: no healing, no shadows, no computed prefixes", serving.ranks.size)
    return cache


def stay_off(cache: KvhubRadixCache, ctx: Any, ranks: Ranks | None, reason: str) -> None:
    """Off from the start: who asks is told the reason, and metrics have `kvhub_on` and the count."""
    cache.metrics = Metrics(bool(ctx.params.enable_metrics) and (ranks is None or ranks.rank == 0))
    cache.metrics.off()
    cache.off_because = reason


def open_serving(ctx: Any, ranks: Ranks) -> Serving:
    """Check everything that one rank can check once. Raises `Refusal` or `KvhubError`."""
    settings = load_settings()
    if name := refused_configuration(ctx):
        raise Refusal(Code.UNSUPPORTED, f"{name} is not supported")
    if absent := hooks.missing():
        raise Refusal(Code.UNSUPPORTED, f"SGLang has no {absent[0]} to hook")
    kvcache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    dtype = str(kvcache.dtype).removeprefix("torch.")
    path = resolve(ctx.server_args.model_path, revision=ctx.server_args.revision)
    if settings.model_path and weights_revision(resolve(settings.model_path)) != weights_revision(path):
        raise Refusal(Code.UNSUPPORTED, "the settings are for another model than the one served")
    identity = identify(path, dtype=dtype)
    heads = heads_of(ranks, identity.geometry.num_kv_heads)
    runner = ctx.tp_worker.model_runner
    found = (
        refused_pool(kvcache, identity.geometry, dtype, heads=heads.count)
        or refused_rotary(runner.model, identity.rope)
        or refused_weights(runner.model, path, rank=ranks.rank, size=ranks.size)
    )
    if found:
        raise Refusal(Code.UNSUPPORTED, f"the server has {found}")
    device = kvcache.k_buffer[0].device
    candidates = open_candidates(settings, identity, device, heads)
    return Serving(
        settings=settings,
        identity=identity,
        candidates=candidates,
        exchange=ShardedExchange(
            open_exchange(settings),
            {identity.digest: heads, **{c.source_digest: c.source_heads for c in candidates}},
            heads,
            publishes=publishes(ranks, heads.total),
        ),
        page_size=ctx.params.page_size,
        # they enter when a rank finds itself idle, which each does at its own time
        internal=InternalRequests() if ranks.size == 1 else None,
        metrics=Metrics(bool(ctx.params.enable_metrics) and ranks.rank == 0),
        ranks=ranks,
        heads=heads.count,
        cost=CostModel.load(Path(settings.cost_file)) if settings.cost_file else CostModel(),
        stream=runner.forward_stream if device.type == "cuda" else None,
    )


def open_exchange(settings: ServingSettings) -> Exchange:
    """A directory, or what the scheme of the setting names (`mooncake://...`)."""
    if settings.exchange.startswith("mooncake://"):
        from kvhub.exchange.mooncake import open_mooncake

        return open_mooncake(settings.exchange)
    return DirectoryExchange(Path(settings.exchange), max_bytes=settings.exchange_max_bytes)


def open_candidates(
    settings: ServingSettings, identity: ModelIdentity, device: Any, heads: HeadSlice
) -> tuple[Candidate, ...]:
    """All mappers of the settings that can be used, within their budget; the others are logged."""
    resident = Resident(settings.mapper_budget) if settings.mapper_budget else None
    candidates = []
    for served in settings.mappers:
        try:
            candidates.append(open_candidate(served, identity, device, heads, resident))
        except (Refusal, KvhubError) as error:
            logger.error("kvhub does not use mapper %s: %s", served.digest[:12], error)
    return tuple(candidates)


def open_candidate(
    served: ServedMapper,
    identity: ModelIdentity,
    device: Any,
    heads: HeadSlice,
    resident: Resident | None = None,
) -> Candidate:
    """Load one mapper and prove that it is the one named, for this model, and passed the gate.

    The settings' word for the state is not taken: the evidence is judged again here.
    """
    mapper = load_mapper(served.path)
    manifest = mapper.manifest
    if manifest.digest != served.digest:
        raise Refusal(Code.CORRUPT, f"the artifact is {manifest.digest[:12]}, not the one named")
    if manifest.target.digest != identity.digest:
        raise Refusal(
            Code.UNSUPPORTED,
            f"it was fitted for {manifest.target.name} {_revision(manifest.target)}, "
            f"this server runs {identity.name} {_revision(identity)}",
        )
    if served.state == "retired":
        raise Refusal(Code.DECLINED, "it is retired")
    evidence = read_evidence(Path(served.path), manifest)
    passed = evidence is not None and rejudge(evidence, manifest).passed
    if not passed:
        why = "has no evidence" if evidence is None else "did not pass the gate"
        if not served.allow_draft:
            raise Refusal(Code.DECLINED, f"it {why}; evaluate it, or allow drafts explicitly")
        logger.warning("kvhub serves mapper %s by override: it %s", served.digest[:12], why)
    mapper = narrow(mapper, heads)
    if resident is not None:
        mapper.keep_in(resident)
    dtype = getattr(torch, identity.dtype)
    try:
        mapper.prepare(device, dtype)
    except ValueError as error:
        raise Refusal(Code.UNSUPPORTED, f"the kernels cannot apply it: {error}") from None
    return Candidate(
        mapper,
        manifest.digest,
        manifest.source,
        draft=not passed,
        served_exact_prefix=served.exact_prefix or 0,
        native_tail=served.native_tail,
        first_head=heads.first,
        make_ready=lambda: mapper.prepare(device, dtype),
        min_span=served.min_span or 1,
        max_hops=served.max_hops or 8,
        max_turn=served.max_turn,
    )


def _revision(identity: ModelIdentity) -> str:
    return f"{identity.revision[:24]} ({identity.dtype}, identity {identity.digest[:12]})"
