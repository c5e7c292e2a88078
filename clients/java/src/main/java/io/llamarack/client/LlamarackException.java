package io.llamarack.client;

/**
 * Root of everything this client throws. All are unchecked.
 *
 * <pre>
 * LlamarackException
 * |- ApiException                  the server answered with an error status
 * |  |- BadRequestException        400, 405, 413, 415, 422: the request itself is wrong
 * |  |  `- ContextLengthException  prompt plus output exceed the model's context
 * |  |- AuthenticationException    401: no key, or a wrong one
 * |  |- PermissionDeniedException  403: the key may not do this
 * |  |- NotFoundException          404: unknown model or path
 * |  |- RateLimitedException       429: over this key's share
 * |  |- OverloadedException        503, 529: no capacity now, or the model is loading
 * |  `- ServerErrorException       every other 5xx
 * |- TransportException            no connection, or it broke
 * |  `- StreamTruncatedException   it broke, or ended, in the middle of an answer
 * |- StreamErrorException          the server reported an error inside a stream
 * |- CallTimeoutException          one of the four time limits; says which
 * |- CallCancelledException        the caller cancelled, closed or was interrupted
 * `- MalformedResponseException    not the JSON that was promised
 * </pre>
 */
public class LlamarackException extends RuntimeException {
    private static final long serialVersionUID = 1L;

    LlamarackException(String message, Throwable cause) {
        super(message, cause);
    }
}
