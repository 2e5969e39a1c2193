package lapssd_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"lapssd"
	pb "lapssd/lapssdv1"
)

// Calls at real gateways: LAPS_SD_TEST_GATEWAYS has their addresses; without them these tests are skipped.

func gateways(t *testing.T) []string {
	t.Helper()
	addresses := os.Getenv("LAPS_SD_TEST_GATEWAYS")
	if addresses == "" {
		t.Skip("no gateway")
	}
	return strings.Split(addresses, ",")
}

func dial(t *testing.T, addresses []string, options lapssd.Options) *lapssd.Client {
	t.Helper()
	client, err := lapssd.New(addresses, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return client
}

func prompt(text string, tokens uint32) *pb.GenerateRequest {
	sampling := &pb.SamplingParams{MaxTokens: proto.Uint32(tokens), Seed: proto.Uint64(1), IgnoreEos: proto.Bool(true)}
	return &pb.GenerateRequest{Prompt: lapssd.Text(text), Sampling: sampling}
}

func generate(t *testing.T, client *lapssd.Client, request *pb.GenerateRequest) *pb.GenerateResponse {
	t.Helper()
	answer, err := client.Generate(context.Background(), request)
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

func equal(t *testing.T, found, expected interface{}) {
	t.Helper()
	if !reflect.DeepEqual(found, expected) {
		t.Errorf("found %v, expected %v", found, expected)
	}
}

// read is what the events of a stream make together.
type read struct {
	id     string
	text   string
	tokens []uint32
	cursor *pb.Cursor
	ended  bool
}

func (r *read) add(event *lapssd.Event) {
	switch {
	case event.Accepted != nil:
		r.id = event.Accepted.RequestId
	case event.Delta != nil:
		r.text += event.Delta.Text
		r.tokens = append(r.tokens, event.Delta.TokenIds...)
		r.cursor = event.Delta.Cursor
	case event.End != nil:
		r.ended = true
	}
}

// all reads a stream to its end and returns what ended it, or to the first token.
func (r *read) all(stream *lapssd.Stream, toFirstToken bool) error {
	for !toFirstToken || len(r.tokens) == 0 {
		event, err := stream.Recv()
		if err != nil {
			return err
		}
		r.add(event)
	}
	return nil
}

func state(t *testing.T, client *lapssd.Client, id string) *pb.Explanation {
	t.Helper()
	explanation, err := client.Explain(context.Background(), id)
	if err != nil {
		t.Fatal(err)
	}
	return explanation
}

func TestCalls(t *testing.T) {
	addresses := gateways(t)
	client := dial(t, addresses, lapssd.Options{})
	ctx := context.Background()

	t.Run("a whole answer and the stream of its request are the same", func(t *testing.T) {
		var found read
		answer := generate(t, client, prompt("Once upon a time", 20))
		equal(t, found.all(client.Stream(ctx, prompt("Once upon a time", 20)), false).Error(), "EOF")
		equal(t, len(answer.TokenIds), 20)
		equal(t, answer.End.FinishReason, pb.FinishReason_FINISH_REASON_LENGTH)
		equal(t, found.text, answer.Text)
		equal(t, found.ended, true)
	})
	t.Run("a key attaches to the request that exists, and another body is refused", func(t *testing.T) {
		keyed := func(text string) *pb.GenerateRequest {
			request := prompt(text, 5)
			request.IdempotencyKey = "go-1"
			return request
		}
		first, again := generate(t, client, keyed("Once")), generate(t, client, keyed("Once"))
		equal(t, again.Accepted.Attached, true)
		equal(t, again.Accepted.RequestId, first.Accepted.RequestId)
		_, err := client.Generate(ctx, keyed("Twice"))
		equal(t, status.Code(err), codes.AlreadyExists)

		var whole read
		equal(t, whole.all(client.Resume(ctx, first.Accepted.RequestId, nil), false).Error(), "EOF")
		equal(t, whole.text, first.Text)
	})
	t.Run("closing a stream early cancels the request", func(t *testing.T) {
		var found read
		stream := client.Stream(ctx, prompt("A long story", 2000))
		equal(t, found.all(stream, true), nil)
		stream.Close()
		equal(t, state(t, client, found.id).FinishReason, pb.FinishReason_FINISH_REASON_CANCELLED)
		_, err := stream.Recv()
		equal(t, status.Code(err), codes.Canceled)
	})
	t.Run("cancelling the context cancels the request", func(t *testing.T) {
		var found read
		limited, cancel := context.WithCancel(ctx)
		stream := client.Stream(limited, prompt("A long story", 2000))
		equal(t, found.all(stream, true), nil)
		cancel()
		equal(t, errors.Is(found.all(stream, false), context.Canceled), true)
		equal(t, state(t, client, found.id).FinishReason, pb.FinishReason_FINISH_REASON_CANCELLED)
	})
	t.Run("closing the client ends its calls and cancels the requests of its streams", func(t *testing.T) {
		closed, err := lapssd.New(addresses, lapssd.Options{})
		equal(t, err, nil)
		var ongoing, left read
		reading, unread := closed.Stream(ctx, prompt("A long story", 2000)), closed.Stream(ctx, prompt("A story", 2000))
		equal(t, ongoing.all(reading, true), nil)
		equal(t, left.all(unread, true), nil)

		go closed.Close()

		equal(t, ongoing.all(reading, false).Error(), "Canceled: the client was closed")
		closed.Close() // waits for the other one
		_, err = unread.Recv()
		equal(t, status.Code(err), codes.Canceled)
		_, err = closed.Models(ctx)
		equal(t, err.Error(), "Canceled: the client was closed")
		for _, id := range []string{ongoing.id, left.id} {
			equal(t, state(t, client, id).FinishReason, pb.FinishReason_FINISH_REASON_CANCELLED)
		}
	})
	t.Run("closing the client ends a call that would be repeated", func(t *testing.T) {
		nobody, err := lapssd.New([]string{"127.0.0.1:1"}, lapssd.Options{Retry: time.Hour})
		equal(t, err, nil)
		failed := make(chan error)
		go func() {
			_, err := nobody.Models(ctx)
			failed <- err
		}()
		nobody.Close()
		equal(t, status.Code(<-failed), codes.Canceled)
	})
	t.Run("unless somebody may come back for it", func(t *testing.T) {
		var found read
		request := prompt("A long story", 2000)
		request.IdempotencyKey = "go-2"
		stream := client.Stream(ctx, request)
		equal(t, found.all(stream, true), nil)
		stream.Close()
		equal(t, state(t, client, found.id).State == pb.Explanation_STATE_ENDED, false)
		for _, expected := range []bool{true, false} {
			cancelled, err := client.Cancel(ctx, found.id)
			equal(t, err, nil)
			equal(t, cancelled, expected)
		}
	})
	t.Run("several outputs of one prompt", func(t *testing.T) {
		request := prompt("Once upon a time", 10)
		request.N = proto.Uint32(3)
		answer := generate(t, client, request)
		equal(t, len(answer.More), 2)
		equal(t, answer.Text == answer.More[0].Text, false)
	})
	t.Run("a refusal names the field and the limit", func(t *testing.T) {
		request := prompt("Once", 5)
		request.Sampling.TopP = proto.Float32(2)
		_, err := client.Generate(ctx, request)
		var found *lapssd.Error
		equal(t, errors.As(err, &found), true)
		equal(t, found.Violations, []lapssd.Violation{{"sampling.top_p", "must be above 0 and at most 1, got 2"}})
		equal(t, found.Error(), "InvalidArgument: sampling.top_p must be above 0 and at most 1, got 2")
		_, err = client.Explain(ctx, "s0.unknown")
		equal(t, status.Code(err), codes.NotFound)
	})
	t.Run("the hard deadline ends the call and the request", func(t *testing.T) {
		var found read
		limited, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		err := found.all(client.Stream(limited, prompt("A long story", 2000)), false)
		equal(t, status.Code(err), codes.DeadlineExceeded)
		// On a busy machine the deadline may pass before the request is accepted.
		if found.id != "" {
			equal(t, state(t, client, found.id).State, pb.Explanation_STATE_ENDED)
		}
	})
	t.Run("tokens and back, and the models", func(t *testing.T) {
		ids, err := client.Tokenize(ctx, &pb.TokenizeRequest{Prompt: &pb.TokenizeRequest_Text{Text: "Once upon a time"}})
		equal(t, err, nil)
		text, err := client.Detokenize(ctx, ids)
		equal(t, err, nil)
		equal(t, text, "Once upon a time")
		models, err := client.Models(ctx)
		equal(t, err, nil)
		equal(t, len(models), 1)
	})
	t.Run("another gateway takes the call of one that is not there", func(t *testing.T) {
		two := dial(t, []string{"127.0.0.1:1", addresses[0]}, lapssd.Options{})
		equal(t, len(generate(t, two, prompt("Once", 3)).TokenIds), 3)
	})
	t.Run("the call after one that failed at an address goes to the next", func(t *testing.T) {
		two := dial(t, []string{"127.0.0.1:1", addresses[0]}, lapssd.Options{Retry: -1})
		_, err := two.Models(ctx)
		equal(t, status.Code(err), codes.Unavailable)
		models, err := two.Models(ctx)
		equal(t, err, nil)
		equal(t, len(models), 1)
	})
	t.Run("a gateway that is not there is reported when patience ends", func(t *testing.T) {
		nobody := dial(t, []string{"127.0.0.1:1"}, lapssd.Options{Retry: 50 * time.Millisecond})
		_, err := nobody.Generate(ctx, prompt("Once", 3))
		equal(t, status.Code(err), codes.Unavailable)
	})
	t.Run("a client needs an address", func(t *testing.T) {
		_, err := lapssd.New(nil, lapssd.Options{})
		equal(t, err == nil, false)
	})
}

// LAPS_SD_TEST_PID is the process of the first gateway.
func TestAKilledGatewayCostsAPauseAndNoTokenIsLostOrComesTwice(t *testing.T) {
	addresses := gateways(t)
	pid, err := strconv.Atoi(os.Getenv("LAPS_SD_TEST_PID"))
	if err != nil {
		t.Skip("no gateway to kill")
	}
	ctx := context.Background()
	two := dial(t, addresses, lapssd.Options{})
	one := dial(t, addresses[:1], lapssd.Options{Reconnect: -1})

	var single, kept read
	keyed := prompt("A kept story", 120)
	keyed.IdempotencyKey = "go-kept"
	singleStream, keptStream := two.Stream(ctx, prompt("A long story", 120)), one.Stream(ctx, keyed)
	equal(t, single.all(singleStream, true), nil)
	equal(t, kept.all(keptStream, true), nil)

	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}

	equal(t, single.all(singleStream, false).Error(), "EOF")
	equal(t, status.Code(kept.all(keptStream, false)), codes.Unavailable)
	equal(t, len(kept.tokens) < 120, true)
	// The id and the cursor are all that a program needs to read on, at any gateway.
	other := dial(t, addresses[1:], lapssd.Options{})
	equal(t, kept.all(other.Resume(ctx, kept.id, kept.cursor), false).Error(), "EOF")

	for text, found := range map[string]read{"A long story": single, "A kept story": kept} {
		calm := generate(t, other, prompt(text, 120))
		equal(t, found.tokens, calm.TokenIds)
		equal(t, found.text, calm.Text)
		equal(t, found.ended, true)
	}
}

// LAPS_SD_TEST_TLS is the folder of ca.pem, cert.pem and key.pem, LAPS_SD_TEST_KEY an API key.
func TestTLSAndAPIKeys(t *testing.T) {
	addresses := gateways(t)
	folder, key := os.Getenv("LAPS_SD_TEST_TLS"), os.Getenv("LAPS_SD_TEST_KEY")
	if folder == "" {
		t.Skip("no gateway with TLS")
	}
	ca, err := os.ReadFile(folder + "/ca.pem")
	equal(t, err, nil)
	certificate, err := tls.LoadX509KeyPair(folder+"/cert.pem", folder+"/key.pem")
	equal(t, err, nil)
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	mine := []tls.Certificate{certificate}

	for name, each := range map[string]struct {
		options lapssd.Options
		code    codes.Code
	}{
		"a client with a certificate and a key is served":               {lapssd.Options{TLS: &tls.Config{RootCAs: pool, Certificates: mine}, APIKey: key}, codes.OK},
		"a client without a known key is refused":                       {lapssd.Options{TLS: &tls.Config{RootCAs: pool, Certificates: mine}}, codes.Unauthenticated},
		"a client refuses a gateway of another CA":                      {lapssd.Options{TLS: &tls.Config{Certificates: mine}, APIKey: key}, codes.Unavailable},
		"a client refuses a gateway whose certificate has no such name": {lapssd.Options{TLS: &tls.Config{RootCAs: pool, Certificates: mine, ServerName: "other.test"}, APIKey: key}, codes.Unavailable},
		"a gateway refuses a client without a certificate":              {lapssd.Options{TLS: &tls.Config{RootCAs: pool}, APIKey: key}, codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			each.options.Retry = 50 * time.Millisecond
			_, err := dial(t, addresses, each.options).Generate(context.Background(), prompt("Once", 3))
			equal(t, status.Code(err), each.code)
		})
	}
}
