import { useEffect, useState } from "preact/hooks";
import { CallError, RETRY_MS, explain } from "../api";
import type { Explanation } from "../model";
import { Numbers, Problem, count, percent, requestLink, seconds } from "../parts";
import { type Doing, spansOf } from "../timeline";

const REFRESH_MS = 1000;
const ENDED = "STATE_ENDED";

/** The explain timeline of one request; it is read again every second until the request has ended. */
export function RequestView({ id }: { id: string }) {
  const [found, setFound] = useState<Explanation>();
  const [problem, setProblem] = useState("");
  const [wanted, setWanted] = useState(id);
  useEffect(() => {
    setWanted(id);
    setFound(undefined);
    setProblem("");
    if (!id) return;
    let timer: ReturnType<typeof setTimeout>;
    let left = false;
    const read = async () => {
      try {
        const answer = await explain(id);
        if (left) return;
        setFound(answer);
        setProblem("");
        if (answer.state !== ENDED) timer = setTimeout(read, REFRESH_MS);
      } catch (error) {
        if (left) return;
        setProblem((error as Error).message);
        if (error instanceof CallError && error.passes) timer = setTimeout(read, RETRY_MS);
      }
    };
    void read();
    return () => {
      left = true;
      clearTimeout(timer);
    };
  }, [id]);
  return (
    <>
      <h1>Request</h1>
      <form
        class="inline"
        onSubmit={(event) => {
          event.preventDefault();
          location.href = requestLink(wanted.trim());
        }}
      >
        <label>
          Id of the request
          <input value={wanted} onInput={(event) => setWanted(event.currentTarget.value)} size={32} spellcheck={false} required maxLength={128} />
        </label>
        <button>Explain</button>
      </form>
      {problem && <Problem>{problem}</Problem>}
      {found && <Explained of={found} />}
    </>
  );
}

/** How a request ended, with the reason if there is one. */
function endOf({ finish_reason, basis }: Explanation): string {
  const reason = words(finish_reason, "FINISH_REASON_");
  return basis ? `${reason}: ${basis}` : reason;
}

function Explained({ of: found }: { of: Explanation }) {
  const ended = found.state === ENDED;
  return (
    <>
      <Numbers
        of={[
          ["State", words(found.state, "STATE_")],
          ...(ended ? [["End", endOf(found)] as [string, string]] : []),
          ["Policy", found.policy],
          ...(found.level === undefined ? [] : [["Level", count(found.level)] as [string, string]]),
          ...(ended ? [] : [["Requests ahead", count(found.ahead)] as [string, string]]),
          ["Tokens", count(found.emitted_tokens)],
          ["Rounds", count(found.rounds)],
          ["Acceptance", found.drafted ? percent(found.accepted / found.drafted) : "no drafts"],
          ["Preemptions", count(found.preemptions)],
          ["Service", seconds(found.attained_s)],
          ["Tenant", found.tenant],
          ...(found.worker_id ? [["Worker", found.worker_id] as [string, string]] : []),
        ]}
      />
      {!ended && (
        <p>
          {found.ordered_by && <>Its place: {found.ordered_by}. </>}
          {found.waits_for && <>It waits for {found.waits_for}. </>}
          {found.basis && (
            <>
              About {seconds(found.remaining_s)} left ({seconds(found.remaining_low_s)} to {seconds(found.remaining_high_s)}); {found.basis}
            </>
          )}
        </p>
      )}
      <Timeline of={found} />
      <div class="wide" tabIndex={0} role="region" aria-label="Events of the request">
        <table class="story">
          <caption>What happened to it</caption>
          <thead>
            <tr>
              <th scope="col" class="number">After</th>
              <th scope="col">Event</th>
              <th scope="col">Detail</th>
            </tr>
          </thead>
          <tbody>
            {found.story.map((line, place) => (
              <tr key={place}>
                <td class="number">{line.at_s.toFixed(3)} s</td>
                <td>{line.what.replace("_", " ")}</td>
                <td>{line.detail}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

const CLASSES: Record<Doing, string> = { waiting: "waiting", running: "running", paused: "paused", "not recorded": "unknown" };

function Timeline({ of: found }: { of: Explanation }) {
  const spans = spansOf(found.story, found.state === ENDED ? 0 : found.age_s);
  const begin = spans[0]?.beginS ?? 0;
  const length = (spans.at(-1)?.endS ?? 0) - begin;
  if (length <= 0) return null;
  const sums = new Map<Doing, number>();
  for (const span of spans) sums.set(span.doing, (sums.get(span.doing) ?? 0) + span.endS - span.beginS);
  const text = [...sums].map(([doing, sum]) => `${doing} ${seconds(sum)}`).join(", ");
  return (
    <figure>
      <svg class="timeline" viewBox="0 0 1000 40" preserveAspectRatio="none" role="img" aria-label={`Timeline: ${text}`}>
        {spans.map((span) => (
          <rect
            key={span.beginS}
            class={CLASSES[span.doing]}
            x={(1000 * (span.beginS - begin)) / length}
            width={Math.max(1, (1000 * (span.endS - span.beginS)) / length)}
            y={span.doing === "running" ? 0 : span.doing === "paused" ? 10 : 16}
            height={span.doing === "running" ? 40 : span.doing === "paused" ? 20 : 8}
          />
        ))}
      </svg>
      <figcaption>
        {[...sums].map(([doing, sum]) => (
          <span key={doing}>
            <span class={`mark ${CLASSES[doing]}`} aria-hidden="true" /> {doing} {seconds(sum)}{" "}
          </span>
        ))}
      </figcaption>
    </figure>
  );
}

function words(name: string, prefix: string): string {
  return name.replace(prefix, "").replaceAll("_", " ").toLowerCase();
}
