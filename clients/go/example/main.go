// Streams one prompt to the terminal: example -gateways 127.0.0.1:50051,127.0.0.1:50061 "Once upon a time".
// Kill the gateway meanwhile: the text goes on at the other one.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"

	"google.golang.org/protobuf/proto"

	"lapssd"
	pb "lapssd/lapssdv1"
)

func main() {
	gateways := flag.String("gateways", "127.0.0.1:50051", "addresses of gateways, separated by commas")
	maxTokens := flag.Uint("max-tokens", 100, "most output tokens")
	flag.Parse()
	prompt := "Once upon a time"
	if flag.NArg() > 0 {
		prompt = flag.Arg(0)
	}
	// Ctrl-C cancels the request.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := stream(ctx, strings.Split(*gateways, ","), prompt, uint32(*maxTokens)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func stream(ctx context.Context, gateways []string, prompt string, maxTokens uint32) error {
	client, err := lapssd.New(gateways, lapssd.Options{APIKey: os.Getenv("LAPS_SD_API_KEY")})
	if err != nil {
		return err
	}
	defer client.Close()
	events := client.Stream(ctx, &pb.GenerateRequest{
		Prompt:   lapssd.Text(prompt),
		Sampling: &pb.SamplingParams{MaxTokens: proto.Uint32(maxTokens)},
	})
	defer events.Close()
	for {
		event, err := events.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if event.Delta != nil {
			fmt.Print(event.Delta.Text)
		}
		if end := event.End; end != nil {
			reason := strings.TrimPrefix(end.FinishReason.String(), "FINISH_REASON_")
			fmt.Printf("\n-- %s, %d tokens, %d of %d draft tokens accepted\n",
				reason, end.Usage.GetCompletionTokens(), end.Speculation.GetAccepted(), end.Speculation.GetDrafted())
		}
	}
}
