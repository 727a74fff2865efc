"""The interceptors of producers and consumers, and `otel`, an interceptor that needs the extra `penstock[otel]`."""

from penstock.shared.clients.interceptors.interceptors import ConsumerInterceptor, ProducerInterceptor

__all__ = ["ConsumerInterceptor", "ProducerInterceptor"]
