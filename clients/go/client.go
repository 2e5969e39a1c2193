// Package lapssd is a client of LAPS-SD gateways. A stream survives a broken connection and the death of its gateway, and no request
// runs twice.
//
// Requests and answers are the messages of the public contract, in lapssd/lapssdv1. A context ends a call, and its deadline is the
// hard one of the request.
package lapssd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	pb "lapssd/lapssdv1"
)

const (
	maxMessageBytes = 16 << 20
	// leaving is the time limit of the cancel call of a client that leaves its stream early.
	leaving = 2 * time.Second
)

// Options of a client. The zero value is that of a gateway without TLS and keys.
type Options struct {
	APIKey string
	// TLS is nil for plain text. &tls.Config{} verifies the gateway by the roots of the system.
	TLS *tls.Config
	// Metadata is sent with every call.
	Metadata map[string]string
	// Reconnect is the longest time to repair the lost connection of a stream: 30 s if it is 0, never if it is negative.
	Reconnect time.Duration
	// Retry is the longest time to repeat a call that has had no effect yet: 5 s if it is 0, never if it is negative.
	Retry time.Duration
}

// Client is a client of one or several gateways of a system. Goroutines may share it.
type Client struct {
	connections []*grpc.ClientConn
	metadata    []string
	reconnect   time.Duration
	retry       time.Duration

	closing context.Context // ends with Close
	end     context.CancelFunc
	close   sync.Once

	mutex  sync.Mutex
	at     int
	unread map[*Stream][]string // ids of the requests to cancel if the client is closed
}

// New returns a client of gateways at host:port. When no server answers at one address, it continues at the next. It connects with
// the first call.
func New(addresses []string, options Options) (*Client, error) {
	if len(addresses) == 0 {
		return nil, errors.New("a client needs the address of a gateway")
	}
	for _, address := range addresses {
		if err := checkAddress(address); err != nil {
			return nil, err
		}
	}
	if strings.IndexFunc(options.APIKey, func(each rune) bool { return each < ' ' || each > '~' }) >= 0 {
		return nil, errors.New("an API key has printable ASCII characters only; this one has others, such as a line break at its end")
	}
	client := &Client{
		reconnect: orDefault(options.Reconnect, 30*time.Second),
		retry:     orDefault(options.Retry, 5*time.Second),
		unread:    map[*Stream][]string{},
	}
	client.closing, client.end = context.WithCancel(context.Background())
	for name, value := range options.Metadata {
		client.metadata = append(client.metadata, name, value)
	}
	if options.APIKey != "" {
		client.metadata = append(client.metadata, "authorization", "Bearer "+options.APIKey)
	}
	for _, address := range addresses {
		connection, err := grpc.Dial(address, dialOptions(options.TLS)...)
		if err != nil {
			client.Close()
			return nil, err
		}
		client.connections = append(client.connections, connection)
	}
	return client, nil
}

// checkAddress refuses a URL: gRPC would look for a host of that name.
func checkAddress(address string) error {
	scheme, rest, isURL := strings.Cut(address, "://")
	if !isURL {
		return nil
	}
	secure := ""
	switch strings.ToLower(scheme) {
	case "grpc", "http":
	case "grpcs", "https":
		secure = " with TLS: &tls.Config{}"
	default:
		return nil
	}
	return fmt.Errorf("the address of a gateway is host:port, such as %s%s, got %q", rest, secure, address)
}

func dialOptions(config *tls.Config) []grpc.DialOption {
	security := grpc.WithInsecure()
	if config != nil {
		security = grpc.WithTransportCredentials(credentials.NewTLS(config))
	}
	return []grpc.DialOption{
		security,
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
		// Middleboxes keep an idle stream, and a dead gateway is noticed.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: 2 * time.Second,
		}),
	}
}

// Close cancels the requests of open streams as Stream.Close does, and ends all calls, with codes.Canceled. Idempotent.
func (c *Client) Close() {
	c.close.Do(func() {
		c.end()
		var ids []string
		c.mutex.Lock()
		for _, each := range c.unread {
			ids = append(ids, each...)
		}
		c.mutex.Unlock()
		c.cancelUnread(ids)
		for _, connection := range c.connections {
			connection.Close()
		}
	})
}

// Generate returns the whole answer: output 0, and the others in More.
func (c *Client) Generate(ctx context.Context, request *pb.GenerateRequest) (*pb.GenerateResponse, error) {
	stream := c.Stream(ctx, request)
	defer stream.Close()
	var found collection
	for {
		event, err := stream.Recv()
		if isEnd(err) {
			return found.whole(), nil
		}
		if err != nil {
			return nil, err
		}
		found.add(event)
	}
}

// Stream sends a request and returns its events as they arrive: of each output Accepted, then Deltas, End last. A request without an
// idempotency key gets one. Close the stream, or read it to its end.
func (c *Client) Stream(ctx context.Context, request *pb.GenerateRequest) *Stream {
	progress, err := newGeneration(request, c.patience(ctx), c.reconnect)
	return &Stream{client: c, ctx: ctx, progress: progress, err: err}
}

// Resume attaches to an existing request and returns its events from the cursor on, from the start if it is nil.
func (c *Client) Resume(ctx context.Context, requestID string, cursor *pb.Cursor) *Stream {
	request := &pb.ResumeRequest{RequestId: requestID, Cursor: cursor}
	return &Stream{client: c, ctx: ctx, progress: newResumption(request, c.patience(ctx), c.reconnect)}
}

// Cancel ends a request. It returns false if the request had already ended.
func (c *Client) Cancel(ctx context.Context, requestID string) (cancelled bool, err error) {
	err = c.call(ctx, func(ctx context.Context, gateway pb.InferenceClient) error {
		response, err := gateway.Cancel(ctx, &pb.CancelRequest{RequestId: requestID})
		cancelled = response.GetCancelled()
		return err
	})
	return cancelled, err
}

// Explain returns why a request is where it is.
func (c *Client) Explain(ctx context.Context, requestID string) (explanation *pb.Explanation, err error) {
	err = c.call(ctx, func(ctx context.Context, gateway pb.InferenceClient) error {
		response, err := gateway.Explain(ctx, &pb.ExplainRequest{RequestId: requestID})
		explanation = response.GetExplanation()
		return err
	})
	return explanation, err
}

// Models returns the models that the gateway serves.
func (c *Client) Models(ctx context.Context) (models []*pb.Model, err error) {
	err = c.call(ctx, func(ctx context.Context, gateway pb.InferenceClient) error {
		response, err := gateway.ListModels(ctx, &pb.ListModelsRequest{})
		models = response.GetModels()
		return err
	})
	return models, err
}

// Tokenize returns the token ids of a text or of chat messages.
func (c *Client) Tokenize(ctx context.Context, request *pb.TokenizeRequest) (ids []uint32, err error) {
	err = c.call(ctx, func(ctx context.Context, gateway pb.InferenceClient) error {
		response, err := gateway.Tokenize(ctx, request)
		ids = response.GetTokenIds()
		return err
	})
	return ids, err
}

// Detokenize returns the text of output tokens.
func (c *Client) Detokenize(ctx context.Context, ids []uint32) (text string, err error) {
	err = c.call(ctx, func(ctx context.Context, gateway pb.InferenceClient) error {
		response, err := gateway.Detokenize(ctx, &pb.DetokenizeRequest{TokenIds: ids})
		text = response.GetText()
		return err
	})
	return text, err
}

// call makes a call that may be repeated.
func (c *Client) call(ctx context.Context, attempt func(context.Context, pb.InferenceClient) error) error {
	limit := c.patience(ctx)
	for {
		gateway, at := c.gateway()
		failed := attempt(c.outgoing(ctx), gateway)
		if failed == nil {
			return nil
		}
		if err := c.ended(ctx); err != nil {
			return err
		}
		if isLost(failed) {
			c.leave(at)
		}
		pause, err := limit.pause(failed, time.Now())
		if err != nil {
			return err
		}
		if err := c.sleep(ctx, pause); err != nil {
			return err
		}
	}
}

// ended returns the error of a call whose context has ended, or that Close has; nil if it may go on.
func (c *Client) ended(ctx context.Context) error {
	if ctx.Err() != nil {
		return contextError(ctx.Err())
	}
	if c.closing.Err() != nil {
		return &Error{Code: codes.Canceled, Message: "the client was closed"}
	}
	return nil
}

// note sets the requests to cancel if the client is closed while a stream is open.
func (c *Client) note(stream *Stream, ids []string) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if len(ids) > 0 {
		c.unread[stream] = ids
	} else {
		delete(c.unread, stream)
	}
}

// cancelUnread cancels the requests of streams that were left. That this fails is no error of the caller.
func (c *Client) cancelUnread(ids []string) {
	ctx, end := context.WithTimeout(c.outgoing(context.Background()), leaving)
	defer end()
	gateway, _ := c.gateway()
	var cancels sync.WaitGroup
	for _, id := range ids {
		cancels.Add(1)
		go func(id string) {
			defer cancels.Done()
			_, _ = gateway.Cancel(ctx, &pb.CancelRequest{RequestId: id})
		}(id)
	}
	cancels.Wait()
}

// patience returns the limit of a call that begins now.
func (c *Client) patience(ctx context.Context) patience {
	deadline, _ := ctx.Deadline()
	return patience{retry: c.retry, deadline: deadline}
}

func (c *Client) outgoing(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, c.metadata...)
}

// gateway returns the present gateway and its number.
func (c *Client) gateway() (pb.InferenceClient, int) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return pb.NewInferenceClient(c.connections[c.at%len(c.connections)]), c.at
}

// leave makes the next gateway the present one, once for all calls that were lost together.
func (c *Client) leave(at int) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.at == at {
		c.at++
	}
}

// sleep waits. It returns an error when the context ends, or the client is closed.
func (c *Client) sleep(ctx context.Context, pause time.Duration) error {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	case <-c.closing.Done():
	}
	return c.ended(ctx)
}

func orDefault(duration, usual time.Duration) time.Duration {
	switch {
	case duration == 0:
		return usual
	case duration < 0:
		return 0
	}
	return duration
}

// Text is a prompt of a GenerateRequest: plain text.
func Text(text string) *pb.GenerateRequest_Text { return &pb.GenerateRequest_Text{Text: text} }

// Chat is a prompt of a GenerateRequest: messages, rendered by the model's chat template.
func Chat(messages ...*pb.ChatMessage) *pb.GenerateRequest_Messages {
	return &pb.GenerateRequest_Messages{Messages: &pb.ChatMessages{Messages: messages}}
}

// Tokens is a prompt of a GenerateRequest: token ids of the model's tokenizer.
func Tokens(ids ...uint32) *pb.GenerateRequest_TokenIds {
	return &pb.GenerateRequest_TokenIds{TokenIds: &pb.TokenIds{Ids: ids}}
}
