"""Every error a user can meet, in one tree.

    LlamarackError                exit 1   HTTP 500   our own fault
    |- UsageError                 exit 2   HTTP 400   a command line that cannot be obeyed
    |  |- ConfigError             exit 2   HTTP 400   the deployment file, a gates file, a keys file
    |  `- ModelError              exit 2   HTTP 400   a model file: missing, truncated, foreign, mismatched
    |- HardwareError              exit 3   HTTP 503   the machine cannot run this
    |- DoesNotFit                 exit 4   HTTP 503   more memory than the cards have
    |- EngineError                exit 5   HTTP 503   an engine that does not do its work
    |  |- StartFailed             exit 5   HTTP 503   died before it was ready
    |  |- NeverReady              exit 5   HTTP 503   alive, but past its deadline
    |  `- NothingRunning          exit 5   HTTP 503   no rack to talk to
    |- InvalidRun                 exit 7   HTTP 500   a measurement that proves nothing
    `- RequestError               exit 1   HTTP 4xx   one request, answered with an envelope
       |- BadRequest              exit 1   HTTP 400   malformed body or field
       |- ContextLengthExceeded   exit 1   HTTP 400   prompt plus output over the context
       |- Unauthorized            exit 1   HTTP 401   no key, or a wrong one
       |- Forbidden               exit 1   HTTP 403   a key without this right
       |- NotFound                exit 1   HTTP 404   unknown path
       |- ModelNotFound           exit 1   HTTP 404   unknown model
       |- MethodNotAllowed        exit 1   HTTP 405   known path, other method
       |- RequestTooSlow          exit 1   HTTP 408   body not sent in time
       |- RequestTooLarge         exit 1   HTTP 413   body over the limit
       |- RateLimited             exit 1   HTTP 429   over this key's share
       |- Overloaded              exit 1   HTTP 503   queue full, or waited too long
       |- NotReady                exit 1   HTTP 503   loading, draining, or no replica
       |- UpstreamFailed          exit 1   HTTP 502   the engine broke off
       `- DeadlineExceeded        exit 1   HTTP 504   the request's time is up

A message names the field, the bound and the given value, without a full stop; the hint is something the
reader can type. `tests/test_errors.py` holds this table against the classes.
"""

from __future__ import annotations


class LlamarackError(Exception):
    """Root of the tree.

    `message`: what failed, in one sentence. `hint`: what to do next, or None. `code`: stable, for programs.
    """

    exit_code = 1
    http_status = 500
    code = "internal_error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class UsageError(LlamarackError):
    exit_code = 2
    http_status = 400
    code = "usage"


class ConfigError(UsageError):
    code = "config_invalid"


class ModelError(UsageError):
    code = "model_invalid"


class HardwareError(LlamarackError):
    exit_code = 3
    http_status = 503
    code = "hardware_unfit"


class DoesNotFit(LlamarackError):
    exit_code = 4
    http_status = 503
    code = "does_not_fit"


class EngineError(LlamarackError):
    exit_code = 5
    http_status = 503
    code = "engine_failed"


class StartFailed(EngineError):
    code = "engine_start_failed"


class NeverReady(EngineError):
    code = "engine_never_ready"


class NothingRunning(EngineError):
    code = "nothing_running"


class InvalidRun(LlamarackError):
    exit_code = 7
    code = "invalid_run"


class RequestError(LlamarackError):
    """One user request that cannot be served; becomes `{"error": {message, type, param, code}}`.

    `param`: the field at fault or None. `retry_after_s`: sent as Retry-After; None sends none.
    `should_retry`: sent as x-should-retry (the OpenAI SDKs obey it); None leaves it to the client.
    """

    http_status = 400
    code = "invalid_request"
    type = "invalid_request_error"

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry


class BadRequest(RequestError):
    pass


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class Unauthorized(RequestError):
    http_status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class Forbidden(RequestError):
    http_status = 403
    code = "permission_denied"
    type = "permission_error"


class NotFound(RequestError):
    http_status = 404
    code = "unknown_path"


class ModelNotFound(RequestError):
    http_status = 404
    code = "model_not_found"


class MethodNotAllowed(RequestError):
    http_status = 405
    code = "method_not_allowed"


class RequestTooSlow(RequestError):
    http_status = 408
    code = "request_timeout"


class RequestTooLarge(RequestError):
    http_status = 413
    code = "request_too_large"


class RateLimited(RequestError):
    http_status = 429
    code = "rate_limit_exceeded"
    type = "rate_limit_error"


class Overloaded(RequestError):
    http_status = 503
    code = "server_is_overloaded"
    type = "server_error"


class NotReady(RequestError):
    http_status = 503
    code = "model_not_ready"
    type = "server_error"


class UpstreamFailed(RequestError):
    http_status = 502
    code = "upstream_failed"
    type = "server_error"


class DeadlineExceeded(RequestError):
    http_status = 504
    code = "deadline_exceeded"
    type = "server_error"
