package lapssd

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const maxPause = time.Second

// cut has parts of gRPC's messages about a stream that ended without a status: so proxies (nginx, HAProxy) end those of a gateway that
// died. The code is Internal, as of a bug of a gateway, but no message of a gateway has these words.
var cut = []string{"RST_STREAM", "without sending trailers"}

// Violation is a wrong field of a request, with a sentence about its limit.
type Violation struct {
	Field       string
	Description string
}

// Error is a call that the server refused, or that could not be completed. Its kind is its Code, which status.Code returns too.
// An error of the caller's context is in its chain.
type Error struct {
	Code    codes.Code
	Message string
	// Violations are the wrong fields, for codes.InvalidArgument.
	Violations []Violation
	// RetryAfter is the server's advice, for codes.ResourceExhausted and codes.Unavailable; nil without advice.
	RetryAfter *time.Duration

	cause error
}

// Error returns the code and the message.
func (e *Error) Error() string { return e.Code.String() + ": " + e.Message }

// GRPCStatus returns the error as a status.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Message) }

// Unwrap returns the error of the caller's context, or nil.
func (e *Error) Unwrap() error { return e.cause }

// errorOf returns the error for a failed call. nil: a stream closed without an end.
func errorOf(failed error) *Error {
	if failed == nil {
		return &Error{Code: codes.Unavailable, Message: "the stream broke off"}
	}
	found := &Error{Code: status.Code(failed), Message: status.Convert(failed).Message()}
	if found.Message == "" {
		found.Message = "the call failed"
	}
	for _, detail := range status.Convert(failed).Details() {
		switch detail := detail.(type) {
		case *errdetails.BadRequest:
			for _, each := range detail.FieldViolations {
				found.Violations = append(found.Violations, Violation{each.Field, each.Description})
			}
		case *errdetails.RetryInfo:
			delay := time.Duration(detail.RetryDelay.GetSeconds())*time.Second + time.Duration(detail.RetryDelay.GetNanos())
			found.RetryAfter = &delay
		}
	}
	if len(found.Violations) > 0 {
		sentences := make([]string, len(found.Violations))
		for at, each := range found.Violations {
			sentences[at] = strings.TrimSpace(each.Field + " " + each.Description)
		}
		found.Message = strings.Join(sentences, "; ")
	}
	return found
}

// contextError returns the error of a call that its caller ended.
func contextError(cause error) *Error {
	code := codes.Canceled
	if errors.Is(cause, context.DeadlineExceeded) {
		code = codes.DeadlineExceeded
	}
	return &Error{Code: code, Message: cause.Error(), cause: cause}
}

// isLost returns whether another address may answer although this one did not. nil: the stream closed without an end.
func isLost(failed error) bool {
	switch status.Code(failed) {
	case codes.Internal:
		for _, words := range cut {
			if strings.Contains(status.Convert(failed).Message(), words) {
				return true
			}
		}
		return false
	case codes.Unavailable, codes.Canceled:
		// A server that stops ends its calls with CANCELLED, although no client cancelled them.
		return true
	}
	return failed == nil
}

// mayWorkLater returns whether no server answered, or the answer advises when to retry.
func mayWorkLater(failed error) bool {
	return isLost(failed) || (status.Code(failed) == codes.ResourceExhausted && errorOf(failed).RetryAfter != nil)
}

// nextPause returns the pause before the next attempt. It doubles with each attempt, and is at least as long as the server advises;
// part of it is random, so that clients do not all retry at once.
func nextPause(failed error, attempts int) time.Duration {
	if attempts > 10 {
		attempts = 10
	}
	pause := 20 * time.Millisecond << attempts
	if pause > maxPause {
		pause = maxPause
	}
	var random [2]byte
	_, _ = rand.Read(random[:]) // before Go 1.20 all processes draw the same numbers from math/rand
	pause = pause/2 + pause/2*time.Duration(binary.BigEndian.Uint16(random[:]))/(1<<16)
	if failed != nil {
		if advice := errorOf(failed).RetryAfter; advice != nil && *advice > pause {
			pause = *advice
		}
	}
	return pause
}
