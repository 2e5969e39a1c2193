package lapssd

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	pb "lapssd/lapssdv1"
)

// How long a call is repeated, and how a broken stream goes on. Pure: time is an argument. The same rules as
// laps_sd/client/repair.py.

// held: a connection that was open for this long has ended the outage before it, although it brought nothing new: a request may wait
// in the queue for longer than the time limit of an outage, behind a proxy that cuts idle connections.
const held = maxPause

// Event is a part of a stream. One of Accepted, Delta and End is set.
type Event struct {
	// Choice is the output, among the n, to which the event belongs.
	Choice   int
	Accepted *pb.Accepted
	Delta    *pb.Delta
	End      *pb.Ended
}

// patience is the time limit for repeating a call that has had no effect yet.
type patience struct {
	retry    time.Duration
	deadline time.Time // of the caller; zero without one
	until    time.Time // zero before the first loss
	attempts int
}

// pause returns the pause before the next call, or the error if there is to be none.
func (p *patience) pause(failed error, now time.Time) (time.Duration, error) {
	p.attempts++
	pause := nextPause(failed, p.attempts)
	if p.until.IsZero() {
		p.until = now.Add(p.retry) // not from the call's start: a hanging gateway is noticed late
		if !p.deadline.IsZero() && p.deadline.Before(p.until) {
			p.until = p.deadline
		}
	}
	if !mayWorkLater(failed) || !now.Add(pause).Before(p.until) {
		return 0, errorOf(failed)
	}
	return pause, nil
}

// progress is that of the outputs of one call, and repairs a lost connection.
type progress struct {
	generate  *pb.GenerateRequest // either this one
	resume    *pb.ResumeRequest   // or this one
	ownKey    bool
	patience  patience
	reconnect time.Duration
	outputs   []output
	lostAt    time.Time
	attempts  int
	repeated  time.Time // when this connection brought what was known
}

// newGeneration returns the progress of a request, which is not changed. One without an idempotency key gets one, so that no
// attempt can run it twice.
func newGeneration(request *pb.GenerateRequest, limit patience, reconnect time.Duration) (*progress, error) {
	request = proto.Clone(request).(*pb.GenerateRequest)
	ownKey := request.IdempotencyKey == ""
	if ownKey {
		key := make([]byte, 16)
		if _, err := rand.Read(key); err != nil {
			return nil, fmt.Errorf("no idempotency key: %w", err)
		}
		request.IdempotencyKey = hex.EncodeToString(key)
	}
	count := int(request.GetN())
	if count < 1 {
		count = 1
	}
	return &progress{generate: request, ownKey: ownKey, patience: limit, reconnect: reconnect, outputs: make([]output, count)}, nil
}

// newResumption returns the progress of an attachment to a request.
func newResumption(request *pb.ResumeRequest, limit patience, reconnect time.Duration) *progress {
	start := output{nextToken: request.GetCursor().GetNextToken(), textOffset: request.GetCursor().GetTextOffset()}
	return &progress{resume: request, patience: limit, reconnect: reconnect, outputs: []output{start}}
}

// accepted returns whether every output is on the record: then a lost connection can be repaired.
func (p *progress) accepted() bool {
	for _, output := range p.outputs {
		if output.requestID == "" {
			return false
		}
	}
	return true
}

// ended returns whether every output has ended.
func (p *progress) ended() bool {
	for _, output := range p.outputs {
		if !output.ended {
			return false
		}
	}
	return true
}

// toCancel returns the ids of the requests to cancel if the caller leaves now: no client can want the rest.
func (p *progress) toCancel() []string {
	if !p.ownKey || p.generate.GetKeep() {
		return nil
	}
	var ids []string
	for _, output := range p.outputs {
		if output.requestID != "" && !output.ended {
			ids = append(ids, output.requestID)
		}
	}
	return ids
}

// next returns the next request, one of the two: the caller's at first, later one that resumes where the stream broke. Several
// outputs are found again by their idempotency key, and are sent from the start; take drops the events that were read before.
func (p *progress) next() (*pb.GenerateRequest, *pb.ResumeRequest) {
	if len(p.outputs) > 1 || !p.accepted() {
		return p.generate, p.resume
	}
	one := p.outputs[0]
	cursor := &pb.Cursor{NextToken: one.nextToken, TextOffset: one.textOffset}
	return nil, &pb.ResumeRequest{RequestId: one.requestID, Cursor: cursor}
}

// take returns the caller's event; nil for one that a repaired stream repeats. Only what is new ends an outage: every connection
// begins with Accepted, also one that is cut after it.
func (p *progress) take(message *pb.GenerateEvent, now time.Time) (*Event, error) {
	if int(message.Choice) >= len(p.outputs) {
		return nil, &Error{Code: codes.Internal, Message: fmt.Sprintf("the server sent output %d of %d", message.Choice, len(p.outputs))}
	}
	event, err := p.outputs[message.Choice].take(message)
	if err != nil {
		return nil, err
	}
	if event == nil {
		if p.repeated.IsZero() {
			p.repeated = now
		}
		return nil, nil
	}
	p.endOutage()
	event.Choice = int(message.Choice)
	return event, nil
}

// lost returns the pause before the next call, or the error if there is to be none, which names the request, so that the caller can
// resume one that it keeps or that has the caller's key. failed is nil if the stream closed without an end.
func (p *progress) lost(failed error, now time.Time) (time.Duration, error) {
	if failed != nil && !p.accepted() {
		return p.patience.pause(failed, now)
	}
	if !p.repeated.IsZero() && now.Sub(p.repeated) >= held {
		p.endOutage()
	}
	p.repeated = time.Time{}
	if p.lostAt.IsZero() {
		p.lostAt = now // not the time of the last message: a hanging gateway is noticed late
	}
	p.attempts++
	pause := nextPause(failed, p.attempts) // a server may advise any
	mayGoOn := p.accepted() && mayWorkLater(failed)
	if !mayGoOn || now.Add(pause).Sub(p.lostAt) > p.reconnect {
		err := errorOf(failed)
		err.Message += p.unfinished()
		return 0, err
	}
	return pause, nil
}

func (p *progress) endOutage() { p.lostAt, p.attempts = time.Time{}, 0 }

// unfinished returns the requests of the outputs that have not ended, in words.
func (p *progress) unfinished() string {
	var ids []string
	for _, output := range p.outputs {
		if output.requestID != "" && !output.ended {
			ids = append(ids, output.requestID)
		}
	}
	switch len(ids) {
	case 0:
		return ""
	case 1:
		return " (request " + ids[0] + ")"
	}
	return " (requests " + strings.Join(ids, ", ") + ")"
}

// output is the read position of one output.
type output struct {
	requestID  string
	nextToken  uint32
	textOffset uint32
	ended      bool
}

// take returns the new part of a message; nil if nothing is new. It is an error if the output is not that of the request any more which
// it began with: the server has lost that one, and has made another of the same key.
func (o *output) take(message *pb.GenerateEvent) (*Event, error) {
	if o.ended {
		return nil, nil
	}
	switch event := message.Event.(type) {
	case *pb.GenerateEvent_Accepted:
		known := o.requestID
		o.requestID = event.Accepted.RequestId
		if known != "" && known != o.requestID {
			return nil, &Error{Code: codes.NotFound, Message: fmt.Sprintf("there is no request '%s'", known)}
		}
		if known == "" {
			return &Event{Accepted: event.Accepted}, nil
		}
	case *pb.GenerateEvent_Delta:
		if unseen := o.unseen(event.Delta); unseen != nil {
			o.nextToken, o.textOffset = unseen.GetCursor().GetNextToken(), unseen.GetCursor().GetTextOffset()
			return &Event{Delta: unseen}, nil
		}
	case *pb.GenerateEvent_End:
		o.ended = true
		return &Event{End: event.End}, nil
	}
	return nil, nil // repeated, or an event of a newer server
}

// unseen returns the part of a delta after the read position; nil if there is none.
func (o *output) unseen(delta *pb.Delta) *pb.Delta {
	// A cursor counts characters of Unicode, a string of Go bytes.
	characters := []rune(delta.Text)
	seenTokens := 0
	if len(delta.TokenIds) > 0 {
		seenTokens = int(o.nextToken) - int(delta.FirstToken)
	}
	seenCharacters := int(o.textOffset) - (int(delta.GetCursor().GetTextOffset()) - len(characters))
	if seenTokens <= 0 && seenCharacters <= 0 {
		return delta
	}
	rest := &pb.Delta{
		Text:       string(characters[within(seenCharacters, len(characters)):]),
		TokenIds:   delta.TokenIds[within(seenTokens, len(delta.TokenIds)):],
		FirstToken: delta.FirstToken,
		Cursor:     delta.Cursor,
		Logprobs:   delta.Logprobs[within(seenTokens, len(delta.Logprobs)):],
	}
	if o.nextToken > rest.FirstToken {
		rest.FirstToken = o.nextToken
	}
	if seenTokens <= 0 { // they come with the first token
		rest.PromptLogprobs = delta.PromptLogprobs
	}
	if rest.Text == "" && len(rest.TokenIds) == 0 {
		return nil
	}
	return rest
}

// within returns the nearest number from 0 to a length.
func within(number, length int) int {
	if number < 0 {
		return 0
	}
	if number > length {
		return length
	}
	return number
}

// collection puts together the response of the unary call.
type collection struct {
	responses []*pb.GenerateResponse
	texts     []*strings.Builder
}

func (c *collection) add(event *Event) {
	for len(c.responses) <= event.Choice {
		c.responses = append(c.responses, &pb.GenerateResponse{})
		c.texts = append(c.texts, &strings.Builder{})
	}
	response := c.responses[event.Choice]
	switch {
	case event.Accepted != nil:
		response.Accepted = event.Accepted
	case event.Delta != nil:
		c.texts[event.Choice].WriteString(event.Delta.Text)
		response.TokenIds = append(response.TokenIds, event.Delta.TokenIds...)
		response.Logprobs = append(response.Logprobs, event.Delta.Logprobs...)
		if event.Delta.PromptLogprobs != nil {
			response.PromptLogprobs = event.Delta.PromptLogprobs
		}
	case event.End != nil:
		response.End = event.End
	}
}

// whole returns choice 0, and the others in More.
func (c *collection) whole() *pb.GenerateResponse {
	for at, response := range c.responses {
		response.Text = c.texts[at].String()
	}
	c.responses[0].More = c.responses[1:]
	return c.responses[0]
}
