"""Mappers: one class per family, one interface to apply them."""

from kvhub.mapper.base import Mapper, SourceRows

__all__ = ["Mapper", "SourceRows"]
