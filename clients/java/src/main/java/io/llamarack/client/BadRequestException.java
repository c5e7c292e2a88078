package io.llamarack.client;

/** The request itself is wrong; the same request fails again (400, 405, 413, 415, 422 and other 4xx). */
public class BadRequestException extends ApiException {
    private static final long serialVersionUID = 1L;

    BadRequestException(ApiError error) {
        super(error);
    }
}
