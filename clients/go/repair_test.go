package lapssd

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/golang/protobuf/ptypes"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "lapssd/lapssdv1"
)

// How calls are repeated and streams go on: the same sentences as of the Python client.

var (
	start       = time.Unix(1_000_000, 0)
	unavailable = status.Error(codes.Unavailable, "")
)

func after(seconds float64) time.Time {
	return start.Add(time.Duration(seconds * float64(time.Second)))
}

func generation(t *testing.T, request *pb.GenerateRequest, retry time.Duration) *progress {
	t.Helper()
	made, err := newGeneration(request, patience{retry: retry}, 30*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func accepted(id string, choice uint32) *pb.GenerateEvent {
	return &pb.GenerateEvent{Choice: choice, Event: &pb.GenerateEvent_Accepted{Accepted: &pb.Accepted{RequestId: id}}}
}

func ended(choice uint32) *pb.GenerateEvent {
	return &pb.GenerateEvent{Choice: choice, Event: &pb.GenerateEvent_End{End: &pb.Ended{}}}
}

// delta has tokens 100, 101 … from a position on, and a text that ends at a character.
func delta(first, count uint32, text string, endsAt uint32, choice uint32) *pb.GenerateEvent {
	made := &pb.Delta{Text: text, FirstToken: first, Cursor: &pb.Cursor{NextToken: first + count, TextOffset: endsAt}}
	for at := first; at < first+count; at++ {
		made.TokenIds = append(made.TokenIds, 100+at)
	}
	return &pb.GenerateEvent{Choice: choice, Event: &pb.GenerateEvent_Delta{Delta: made}}
}

// fullFor is a gateway's refusal with a retry delay.
func fullFor(t *testing.T, delay time.Duration) error {
	t.Helper()
	made, err := status.New(codes.ResourceExhausted, "full").WithDetails(&errdetails.RetryInfo{RetryDelay: ptypes.DurationProto(delay)})
	if err != nil {
		t.Fatal(err)
	}
	return made.Err()
}

func take(t *testing.T, p *progress, messages ...*pb.GenerateEvent) []*Event {
	t.Helper()
	var events []*Event
	for _, message := range messages {
		event, err := p.take(message, start)
		if err != nil {
			t.Fatal(err)
		}
		if event != nil {
			events = append(events, event)
		}
	}
	return events
}

func check(t *testing.T, holds bool, sentence string) {
	t.Helper()
	if !holds {
		t.Error("not so: " + sentence)
	}
}

func mustWait(t *testing.T, p *progress, failed error, at time.Time) time.Duration {
	t.Helper()
	pause, err := p.lost(failed, at)
	if err != nil || pause <= 0 {
		t.Fatalf("no pause but %v, %v", pause, err)
	}
	return pause
}

func mustFail(t *testing.T, p *progress, failed error, at time.Time, code codes.Code) {
	t.Helper()
	var found *Error
	if _, err := p.lost(failed, at); !errors.As(err, &found) || found.Code != code || status.Code(err) != code {
		t.Fatalf("not %v but %v", code, err)
	}
}

func TestARequestWithoutAKeyGetsOneAndEveryAttemptHasTheSame(t *testing.T) {
	given := &pb.GenerateRequest{Prompt: Text("x")}
	p := generation(t, given, 30*time.Second)
	first, _ := p.next()
	check(t, regexp.MustCompile(`^[0-9a-f]{32}$`).MatchString(first.IdempotencyKey), "128 random bits")
	check(t, given.IdempotencyKey == "", "the caller's request is not changed")

	mustWait(t, p, unavailable, after(1))

	second, _ := p.next()
	check(t, proto.Equal(first, second), "the second attempt is the first one")
}

func TestWhatNobodyAnsweredIsTriedAgain(t *testing.T) {
	for _, code := range []codes.Code{codes.Unavailable, codes.Canceled} {
		mustWait(t, generation(t, &pb.GenerateRequest{}, 30*time.Second), status.Error(code, ""), after(1))
	}
	mustFail(t, generation(t, &pb.GenerateRequest{}, 30*time.Second), status.Error(codes.InvalidArgument, ""), after(1), codes.InvalidArgument)
}

func TestAnOutputWhoseRequestIsLostDoesNotGoOnWithThatOfAnotherAndOneThatHasEndedGetsNothingOfIt(t *testing.T) {
	p := generation(t, &pb.GenerateRequest{N: proto.Uint32(2)}, 30*time.Second)
	take(t, p, accepted("s0.a", 0), accepted("s0.b", 1), delta(0, 1, "a", 1, 0), ended(0))
	mustWait(t, p, nil, after(0))

	events := take(t, p, accepted("s0.c", 0), delta(1, 1, "b", 2, 0), ended(0))
	check(t, len(events) == 0, "one that has ended gets nothing")
	_, err := p.take(accepted("s0.d", 1), start)
	check(t, status.Code(err) == codes.NotFound && strings.Contains(err.Error(), "'s0.b'"), "the error names the lost request")
	ids := p.toCancel()
	check(t, len(ids) == 1 && ids[0] == "s0.d", "the other request is cancelled")
}

func TestAStreamThatAProxyCutsIsTriedAgainAndABugOfAGatewayIsNot(t *testing.T) {
	for _, message := range []string{
		"stream terminated by RST_STREAM with error code: INTERNAL_ERROR",
		"server closed the stream without sending trailers",
	} {
		mustWait(t, generation(t, &pb.GenerateRequest{}, 30*time.Second), status.Error(codes.Internal, message), after(1))
	}
	bug := status.Error(codes.Internal, "internal error, incident 0a1b2c3d")
	mustFail(t, generation(t, &pb.GenerateRequest{}, 30*time.Second), bug, after(1), codes.Internal)
}

func TestBeforeARequestIsAcceptedACallIsRepeatedForTheTimeOfRetryFromItsFirstLossOn(t *testing.T) {
	p := generation(t, &pb.GenerateRequest{}, 5*time.Second)
	mustWait(t, p, unavailable, after(25))
	mustWait(t, p, unavailable, after(29))
	mustFail(t, p, unavailable, after(31), codes.Unavailable)

	hurried := generation(t, &pb.GenerateRequest{}, 5*time.Second)
	hurried.patience.deadline = after(25)
	mustFail(t, hurried, unavailable, after(25), codes.Unavailable)
}

func TestTwoProcessesPauseForDifferentTimes(t *testing.T) {
	if os.Getenv("LAPS_SD_TEST_PAUSES") != "" {
		for attempt := 1; attempt < 5; attempt++ {
			fmt.Println(nextPause(nil, attempt))
		}
		return
	}
	pauses := func() string {
		process := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
		process.Env = append(os.Environ(), "LAPS_SD_TEST_PAUSES=yes")
		printed, err := process.Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(printed)
	}
	first, second := pauses(), pauses()
	check(t, strings.Count(first, "ms\n") == 4 && first != second, "clients that were lost together do not all retry at once")
}

func TestAPauseIsHalfRandom(t *testing.T) {
	for n := 0; n < 100; n++ {
		pause := nextPause(nil, 20)
		check(t, pause >= maxPause/2 && pause <= maxPause, "from half of the longest pause to all of it")
	}
}

func TestAClientRefusesWhatGRPCWouldTakeForAHostAndAKeyThatNoHeaderCanHold(t *testing.T) {
	for address, form := range map[string]string{
		"http://host:50051": "such as host:50051, got",
		"GRPCS://host:443":  "such as host:443 with TLS: &tls.Config{}, got",
	} {
		_, err := New([]string{"127.0.0.1:50051", address}, Options{})
		check(t, err != nil && strings.Contains(err.Error(), form), "the error has the form to use: "+form)
	}
	_, err := New([]string{"127.0.0.1:50051"}, Options{APIKey: "laps-sd-secret\n"})
	check(t, err != nil && strings.Contains(err.Error(), "line break") && !strings.Contains(err.Error(), "secret"), "the error does not have the key")
}

func TestTheTimeToReconnectBeginsWhenTheLossIsNoticed(t *testing.T) {
	p := generation(t, &pb.GenerateRequest{}, 30*time.Second)
	take(t, p, accepted("s0.r", 0))

	mustWait(t, p, nil, after(61))
	mustWait(t, p, nil, after(90))
	mustFail(t, p, nil, after(91.1), codes.Unavailable)
}

// loseUntilItFails lets a stream be lost again and again, each time after what a connection brings, and returns the error.
func loseUntilItFails(t *testing.T, p *progress, failed error, brings ...*pb.GenerateEvent) error {
	t.Helper()
	now := start
	for attempts := 0; attempts < 1_000; attempts++ {
		pause, err := p.lost(failed, now)
		if err != nil {
			return err
		}
		now = now.Add(pause)
		for _, message := range brings {
			if _, err := p.take(message, now); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Fatal("it reconnects without end")
	return nil
}

func TestConnectionsThatOnlyRepeatWhatIsKnownDoNotEndAnOutage(t *testing.T) {
	for _, failed := range []error{nil, unavailable} {
		one := generation(t, &pb.GenerateRequest{}, 30*time.Second)
		take(t, one, accepted("s0.r", 0), delta(0, 2, "ab", 2, 0))
		two := generation(t, &pb.GenerateRequest{N: proto.Uint32(2)}, 30*time.Second)
		take(t, two, accepted("s0.a", 0), accepted("s0.b", 1), delta(0, 1, "a", 1, 1))

		first := loseUntilItFails(t, one, failed, accepted("s0.r", 0))
		second := loseUntilItFails(t, two, failed, accepted("s0.a", 0), accepted("s0.b", 1), delta(0, 1, "a", 1, 1))

		check(t, status.Code(first) == codes.Unavailable && strings.HasSuffix(first.Error(), " (request s0.r)"), "the error names the request")
		check(t, status.Code(second) == codes.Unavailable && strings.HasSuffix(second.Error(), " (requests s0.a, s0.b)"), "or all of them")
	}
}

func TestAConnectionThatBringsATokenEndsTheOutage(t *testing.T) {
	p := generation(t, &pb.GenerateRequest{}, 30*time.Second)
	take(t, p, accepted("s0.r", 0))
	mustWait(t, p, nil, after(0))
	mustWait(t, p, nil, after(28))
	take(t, p, accepted("s0.r", 0), delta(0, 1, "a", 1, 0))

	mustWait(t, p, nil, after(31))
	mustFail(t, p, nil, after(62), codes.Unavailable)
}

func TestAConnectionThatHeldWhileTheRequestWaitedEndsTheOutage(t *testing.T) {
	p := generation(t, &pb.GenerateRequest{}, 30*time.Second)
	take(t, p, accepted("s0.r", 0))
	mustWait(t, p, nil, after(-20))
	take(t, p, accepted("s0.r", 0)) // at 0

	mustWait(t, p, nil, after(60))
	mustWait(t, p, nil, after(89))
	mustFail(t, p, nil, after(91.1), codes.Unavailable)
}

func TestARequestThatWaitsBehindAProxyThatCutsIdleConnectionsIsNotGivenUp(t *testing.T) {
	for _, cutAfter := range []time.Duration{1500 * time.Millisecond, 3 * time.Second, time.Minute} {
		p := generation(t, &pb.GenerateRequest{}, 30*time.Second)
		now := start
		for cut := 0; cut < 100; cut++ {
			if _, err := p.take(accepted("s0.r", 0), now); err != nil {
				t.Fatal(err)
			}
			now = now.Add(cutAfter)
			pause, err := p.lost(nil, now)
			if err != nil {
				t.Fatal(err)
			}
			now = now.Add(pause)
		}
	}
}

func TestAFullGatewayThatALostStreamComesToIsAskedAgainWhenItSays(t *testing.T) {
	p := generation(t, &pb.GenerateRequest{}, 0)
	take(t, p, accepted("s0.r", 0))

	check(t, mustWait(t, p, fullFor(t, 2500*time.Millisecond), after(2)) == 2500*time.Millisecond, "the pause is the advice")
	mustFail(t, p, fullFor(t, 2500*time.Millisecond), after(33), codes.ResourceExhausted)
}

func TestNoAdviceMakesALostStreamWaitBeyondItsTimeToReconnect(t *testing.T) {
	p := generation(t, &pb.GenerateRequest{}, 0)
	take(t, p, accepted("s0.r", 0))

	mustWait(t, p, fullFor(t, 20*time.Second), after(2))
	mustFail(t, p, fullFor(t, 31*time.Second), after(2), codes.ResourceExhausted)
}

func TestWithoutTimeToReconnectALostStreamEnds(t *testing.T) {
	p := generation(t, &pb.GenerateRequest{}, 0)
	p.reconnect = 0
	take(t, p, accepted("s0.r", 0))

	mustFail(t, p, nil, after(2), codes.Unavailable)
}

func TestALostStreamResumesAtTheCursorOfItsLastDelta(t *testing.T) {
	p := generation(t, &pb.GenerateRequest{}, 30*time.Second)
	take(t, p, accepted("s0.r", 0), delta(0, 2, "ab", 2, 0))
	mustWait(t, p, unavailable, after(1))

	_, resume := p.next()
	events := take(t, p, accepted("s0.r", 0), delta(1, 3, "bcd", 4, 0), delta(1, 3, "bcd", 4, 0), ended(0), ended(0))

	check(t, proto.Equal(resume, &pb.ResumeRequest{RequestId: "s0.r", Cursor: &pb.Cursor{NextToken: 2, TextOffset: 2}}), "it resumes at the cursor")
	check(t, len(events) == 2 && events[1].End != nil && p.ended(), "the caller gets nothing twice")
	rest := &pb.Delta{Text: "cd", TokenIds: []uint32{102, 103}, FirstToken: 2, Cursor: &pb.Cursor{NextToken: 4, TextOffset: 4}}
	check(t, proto.Equal(events[0].Delta, rest), "what is new of a delta remains")
}

func TestTextIsCutByCharactersOfUnicode(t *testing.T) {
	p := generation(t, &pb.GenerateRequest{}, 30*time.Second)
	take(t, p, accepted("s0.r", 0), delta(0, 1, "🦀a", 2, 0))

	events := take(t, p, delta(0, 2, "🦀a🦀é", 4, 0))

	check(t, len(events) == 1 && events[0].Delta.Text == "🦀é", "as its cursor counts them")
}

func TestSeveralOutputsAreFoundAgainByTheirKey(t *testing.T) {
	p := generation(t, &pb.GenerateRequest{N: proto.Uint32(2)}, 30*time.Second)
	take(t, p, accepted("s0.a", 0), accepted("s0.b", 1), delta(0, 1, "a", 1, 1))
	mustWait(t, p, unavailable, after(1))

	events := take(t, p, accepted("s0.a", 0), accepted("s0.b", 1), delta(0, 2, "ab", 2, 1), delta(0, 1, "x", 1, 0), ended(0), ended(1))

	generate, resume := p.next()
	check(t, generate != nil && resume == nil, "the request is sent again")
	check(t, len(events) == 4 && events[0].Choice == 1 && events[0].Delta.Text == "b" && events[1].Delta.Text == "x", "events are not repeated")
	_, err := p.take(accepted("s0.c", 2), start)
	check(t, err != nil, "a third output is refused")
}

func TestACallerThatLeavesCancelsWhatNobodyCanComeBackFor(t *testing.T) {
	cancelled := func(request *pb.GenerateRequest) int {
		request.N = proto.Uint32(2)
		p := generation(t, request, 30*time.Second)
		take(t, p, accepted("s0.a", 0), accepted("s0.b", 1), ended(0))
		return len(p.toCancel())
	}
	check(t, cancelled(&pb.GenerateRequest{}) == 1, "of two, one has ended")
	check(t, cancelled(&pb.GenerateRequest{Keep: true}) == 0, "what is kept runs on")
	check(t, cancelled(&pb.GenerateRequest{IdempotencyKey: "mine"}) == 0, "the caller's key finds it again")
	check(t, newResumption(&pb.ResumeRequest{RequestId: "s0.a"}, patience{}, 0).toCancel() == nil, "a request of somebody else runs on")
}
