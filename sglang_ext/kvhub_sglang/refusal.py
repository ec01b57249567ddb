"""Why a request was not served from a mapped cache: typed, counted, logged."""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """One word per outcome; `mapped` and `exact` are the two that are no refusals."""

    MAPPED = "mapped"  # mapped rows were reused
    EXACT = "exact"  # the server's own rows cover all that is worth covering
    NOT_ASKED = "not_asked"  # the request did not ask for reuse
    DECLINED = "declined"  # the server's policy or the request says no
    FORGED_SALT = "forged_salt"  # the client used a reserved namespace name
    STAGING = "staging"  # the request ended while its blocks were still being read
    SLOW = "slow"  # the exchange did not answer in time
    NOT_WORTH_IT = "not_worth_it"  # mapping would take longer than computing
    WITHDRAWN = "withdrawn"  # the mapper was taken out of service meanwhile
    NO_SOURCE = "no_source"  # no block of an allowed source is in the exchange
    SHORT = "short"  # too few tokens to gain
    HOPS = "hops"  # only blocks with too many mappers under them
    TURNS = "turns"  # a later turn than its mappers are used for, or none was told
    EXACT_PREFIX = "exact_prefix"  # the first tokens, which the mapper leaves out, are not held
    HICACHE = "hicache"  # SGLang's own host cache already serves this request
    CAPACITY = "capacity"  # no free slots, no memory to stage blocks, or too little for its mappers
    EXCHANGE = "exchange"  # the exchange failed or a block vanished
    CORRUPT = "corrupt"  # a block failed its checks
    NOT_FINITE = "not_finite"  # mapped rows are not finite
    UNSUPPORTED = "unsupported"  # a kind of request that is not served (session, embeddings)
    DISABLED = "disabled"  # kvhub is off in this process
    INTERNAL = "internal"  # an unexpected error inside kvhub


class Refusal(Exception):
    """A handoff that does not take place. The request is prefilled."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"
