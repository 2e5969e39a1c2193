package lapssd

import (
	"context"
	"errors"
	"io"
	"time"

	pb "lapssd/lapssdv1"
)

// Stream is the events of a call. One goroutine may read it.
type Stream struct {
	client   *Client
	ctx      context.Context
	progress *progress

	call messages           // nil between two attempts
	end  context.CancelFunc // of the call
	at   int                // number of its gateway
	err  error              // after the last event
}

type messages interface {
	Recv() (*pb.GenerateEvent, error)
}

func isEnd(err error) bool { return errors.Is(err, io.EOF) }

// Recv returns the next event; io.EOF after the end of every output; otherwise an *Error.
func (s *Stream) Recv() (*Event, error) {
	for s.err == nil {
		if s.progress.ended() {
			s.finish(io.EOF)
			break
		}
		if event := s.attempt(); event != nil {
			return event, nil
		}
	}
	return nil, s.err
}

// Close ends the stream. Before its end it cancels the requests, unless one has an idempotency key or Keep. Idempotent.
func (s *Stream) Close() {
	if s.err == nil {
		s.finish(contextError(context.Canceled))
	}
}

// attempt returns the next event; nil if there was none, or the connection was lost.
func (s *Stream) attempt() *Event {
	message, failed := s.receive()
	if failed == nil {
		event, err := s.progress.take(message, time.Now())
		if err == nil && s.client.closing.Err() != nil {
			err = s.client.ended(s.ctx) // the event may be the end that Close brought about
		}
		if err != nil {
			s.finish(err)
			return nil
		}
		if event != nil && event.Delta == nil {
			s.client.note(s, s.progress.toCancel())
		}
		return event
	}
	s.hangUp()
	if err := s.client.ended(s.ctx); err != nil {
		s.finish(err)
		return nil
	}
	if isEnd(failed) {
		failed = nil
	}
	if isLost(failed) {
		s.client.leave(s.at)
	}
	pause, err := s.progress.lost(failed, time.Now())
	if err == nil {
		err = s.client.sleep(s.ctx, pause)
	}
	if err != nil {
		s.finish(err)
	}
	return nil
}

// receive returns the next message of the present call, which it starts if there is none.
func (s *Stream) receive() (*pb.GenerateEvent, error) {
	if s.call == nil {
		var gateway pb.InferenceClient
		var ctx context.Context
		gateway, s.at = s.client.gateway()
		ctx, s.end = context.WithCancel(s.client.outgoing(s.ctx))
		var failed error
		if generate, resume := s.progress.next(); resume != nil {
			s.call, failed = gateway.Resume(ctx, resume)
		} else {
			s.call, failed = gateway.GenerateStream(ctx, generate)
		}
		if failed != nil {
			return nil, failed
		}
	}
	return s.call.Recv()
}

func (s *Stream) hangUp() {
	if s.end != nil {
		s.end()
	}
	s.call, s.end = nil, nil
}

// finish ends the stream with an error, and cancels the requests that no client can want.
func (s *Stream) finish(err error) {
	s.err = err
	s.hangUp()
	if s.progress == nil {
		return
	}
	s.client.note(s, nil)
	s.client.cancelUnread(s.progress.toCancel())
}
