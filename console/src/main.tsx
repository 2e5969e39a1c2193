// The frame of the console: navigation, the viewer's key, and the stream of snapshots that the views share.

import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { type CallError, saveKey, savedKey, watch } from "./api";
import { History } from "./history";
import type { Snapshot } from "./model";
import { Problem } from "./parts";
import { ChartsView } from "./views/charts";
import { DemoView } from "./views/demo";
import { PlaygroundView } from "./views/playground";
import { QueueView } from "./views/queue";
import { RequestView } from "./views/request";
import { WorkersView } from "./views/workers";

const VIEWS = { queue: "Queue", workers: "Workers", charts: "Charts", playground: "Playground", request: "Request", demo: "Demo" };
type View = keyof typeof VIEWS;
const HOME: View = "queue";
const LIVE: readonly View[] = ["queue", "workers", "charts"];

interface Place {
  view: View;
  id: string;
}

function placeOf({ pathname, hash }: Location): Place {
  if (pathname.replace(/\/$/, "").endsWith("/demo")) return { view: "demo", id: "" };
  const [name, id = ""] = hash.slice(1).split("/");
  return { view: name! in VIEWS ? (name as View) : HOME, id: decoded(id) };
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function Console() {
  const [place, setPlace] = useState(placeOf(location));
  const [key, setKey] = useState(savedKey());
  const [snapshot, setSnapshot] = useState<Snapshot>();
  const [failure, setFailure] = useState<CallError>();
  const history = useRef(new History());
  const main = useRef<HTMLElement>(null);
  const needsData = place.view !== "demo";

  useEffect(() => {
    const onHash = () => {
      setPlace(placeOf(location));
      main.current?.focus();
    };
    addEventListener("hashchange", onHash);
    return () => removeEventListener("hashchange", onHash);
  }, []);
  useEffect(() => {
    document.title = `${VIEWS[place.view]}: LAPS-SD console`;
  }, [place.view]);
  useEffect(() => {
    if (!needsData) return;
    const abort = new AbortController();
    history.current = new History();
    setSnapshot(undefined);
    setFailure(undefined);
    void watch(
      abort.signal,
      (newest) => {
        history.current.add(newest);
        setSnapshot(newest);
        setFailure(undefined);
      },
      setFailure,
    );
    return () => abort.abort();
  }, [needsData, key]);

  const takeKey = (given: string) => {
    saveKey(given);
    setKey(given);
  };
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), main.current?.focus())}>Skip to the content</a>
      <header>
        <span class="brand">LAPS-SD</span>
        <nav aria-label="Views">
          {(Object.keys(VIEWS) as View[]).map((view) => (
            <a key={view} href={view === "demo" ? "/console/demo" : `/console#${view}`} aria-current={view === place.view ? "page" : undefined}>
              {VIEWS[view]}
            </a>
          ))}
        </nav>
        {key && (
          <button type="button" onClick={() => takeKey("")}>Forget the key</button>
        )}
      </header>
      <main ref={main} tabIndex={-1}>
        {needsData && failure && <Problem>{failure.message}</Problem>}
        {needsData && failure?.status === 401 ? (
          <KeyForm onKey={takeKey} />
        ) : (
          <Content place={place} snapshot={snapshot} history={history.current} waits={!failure} />
        )}
      </main>
    </>
  );
}

function Content(props: { place: Place; snapshot: Snapshot | undefined; history: History; waits: boolean }) {
  const { place, snapshot } = props;
  if (LIVE.includes(place.view) && !snapshot) return props.waits ? <p>Waiting for the gateway …</p> : null;
  switch (place.view) {
    case "queue":
      return <QueueView snapshot={snapshot!} />;
    case "workers":
      return <WorkersView snapshot={snapshot!} />;
    case "charts":
      return <ChartsView moments={props.history.moments} seesAll={snapshot!.seesAll} />;
    case "playground":
      return <PlaygroundView />;
    case "request":
      return <RequestView id={place.id} />;
    case "demo":
      return <DemoView />;
  }
}

function KeyForm({ onKey }: { onKey: (key: string) => void }) {
  const [given, setGiven] = useState("");
  return (
    <form
      class="inline"
      onSubmit={(event) => {
        event.preventDefault();
        onKey(given.trim());
      }}
    >
      <label>
        Key of this gateway
        <input type="password" autocomplete="off" required maxLength={256} value={given} onInput={(event) => setGiven(event.currentTarget.value)} />
      </label>
      <button>Use the key</button>
      <p class="note">It stays in this tab until you close it.</p>
    </form>
  );
}

render(<Console />, document.getElementById("console")!);
