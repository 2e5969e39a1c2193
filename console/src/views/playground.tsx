import { useEffect, useRef, useState } from "preact/hooks";
import { CallError, RETRY_MS, call } from "../api";
import { type Summary, type Token, generate } from "../generation";
import { Numbers, Problem, count, percent, requestLink, seconds } from "../parts";

const ORIGINS = { accepted: "accepted draft token", bonus: "bonus token of the target", unknown: "" };

export function PlaygroundView() {
  const [model, setModel] = useState("");
  const [kind, setKind] = useState<"chat" | "text">("chat");
  const [prompt, setPrompt] = useState("");
  const [maxTokens, setMaxTokens] = useState(128);
  const [temperature, setTemperature] = useState(0);
  const [id, setId] = useState("");
  const [tokens, setTokens] = useState<readonly Token[]>([]);
  const [summary, setSummary] = useState<Summary>();
  const [problem, setProblem] = useState("");
  const running = useRef<AbortController | null>(null);
  const [busy, setBusy] = useState(false);

  useEffect(() => {
    let timer: ReturnType<typeof setTimeout>;
    let left = false;
    const find = async () => {
      try {
        const models = (await (await call("/v1/models")).json()) as { data: { id: string }[] };
        if (left) return;
        setModel(models.data[0]?.id ?? "");
        setProblem("");
      } catch (error) {
        if (left) return;
        setProblem((error as Error).message);
        if (error instanceof CallError && error.passes) timer = setTimeout(find, RETRY_MS);
      }
    };
    void find();
    return () => {
      left = true;
      clearTimeout(timer);
      running.current?.abort();
    };
  }, []);

  const start = async () => {
    const abort = new AbortController();
    running.current = abort;
    setBusy(true);
    setProblem("");
    setSummary(undefined);
    setTokens([]);
    setId("");
    try {
      const options = { kind, model, prompt, maxTokens, temperature };
      setSummary(await generate(options, abort.signal, setId, (all) => setTokens([...all])));
    } catch (error) {
      if (!abort.signal.aborted) setProblem((error as Error).message);
    } finally {
      setBusy(false);
    }
  };

  return (
    <>
      <h1>Playground</h1>
      <form
        class="playground"
        onSubmit={(event) => {
          event.preventDefault();
          void start();
        }}
      >
        <label>
          Prompt
          <textarea rows={4} required value={prompt} onInput={(event) => setPrompt(event.currentTarget.value)} />
        </label>
        <div class="inline">
          <label>
            As
            <select value={kind} onChange={(event) => setKind(event.currentTarget.value as "chat" | "text")}>
              <option value="chat">a chat message</option>
              <option value="text">text to continue</option>
            </select>
          </label>
          <label>
            Most tokens
            <input type="number" min={1} max={32768} value={maxTokens} onInput={(event) => setMaxTokens(event.currentTarget.valueAsNumber)} />
          </label>
          <label>
            Temperature
            <input type="number" min={0} max={2} step={0.1} value={temperature} onInput={(event) => setTemperature(event.currentTarget.valueAsNumber)} />
          </label>
          {busy ? (
            <button key="stop" type="button" onClick={() => running.current?.abort()}>Stop</button>
          ) : (
            <button key="send" disabled={!model}>Send</button>
          )}
        </div>
      </form>
      {problem && <Problem>{problem}</Problem>}
      {(tokens.length > 0 || busy) && (
        <section aria-label="Output">
          <p class="output" aria-busy={busy}>
            {tokens.map((token, place) => (
              <span key={place} class={token.origin} title={ORIGINS[token.origin] || undefined}>{token.text}</span>
            ))}
          </p>
          {tokens.some((token) => token.origin !== "unknown") && (
            <ul class="legend">
              <li><span class="output"><span class="accepted">accepted</span></span> draft token that the target kept</li>
              <li><span class="output"><span class="bonus">bonus</span></span> token that the target added itself, one a round</li>
            </ul>
          )}
          {id && <p><a href={requestLink(id)}>Timeline of this request</a></p>}
          {summary && <Outcome of={summary} />}
        </section>
      )}
    </>
  );
}

function Outcome({ of: summary }: { of: Summary }) {
  const { drafted, accepted } = summary;
  return (
    <>
      <Numbers
        of={[
          ["End", summary.finish || "unknown"],
          ["Prompt tokens", count(summary.promptTokens)],
          ["Output tokens", count(summary.outputTokens)],
          ["Draft tokens", count(drafted)],
          ["Accepted", drafted ? `${count(accepted)} (${percent(accepted / drafted)})` : "0"],
          ["Rejected", count(drafted - accepted)],
          ...(summary.firstTokenS === undefined ? [] : [["First token", seconds(summary.firstTokenS)] as [string, string]]),
          ...(summary.totalS === undefined ? [] : [["Total", seconds(summary.totalS)] as [string, string]]),
          ...(summary.preemptions === undefined ? [] : [["Preemptions", count(summary.preemptions)] as [string, string]]),
        ]}
      />
      <p class="note">
        Rejected draft tokens are counted only: they never become part of an output.
        {!summary.exact && " Some rounds arrived together, so that not every colour is right."}
      </p>
    </>
  );
}
