import { useState } from "preact/hooks";
import { type Request, type Shard, type Snapshot, phaseOf } from "../model";
import { Legend, Numbers, PHASES, Picture, Problem, count, requestLink, seconds, tally } from "../parts";

const ROWS = 50;

export function QueueView({ snapshot }: { snapshot: Snapshot }) {
  return (
    <>
      <h1>Queue</h1>
      {!snapshot.seesAll && <p class="note">You see the requests of your key only.</p>}
      {snapshot.shards.map((shard) => (
        <ShardQueue key={shard.shard} shard={shard} alone={snapshot.shards.length === 1} />
      ))}
    </>
  );
}

function ShardQueue({ shard, alone }: { shard: Shard; alone: boolean }) {
  const counts = tally(shard.requests);
  const hidden = shard.complete === false;
  return (
    <section aria-label={`Shard ${shard.shard}`}>
      {!alone && <h2>Shard {shard.shard}</h2>}
      {shard.problem && <Problem>{shard.problem}</Problem>}
      {shard.policy !== undefined && (
        <Numbers
          of={[
            ["Policy", shard.policy],
            ["Running", count(counts.running)],
            ["Waiting", count(counts.waiting + counts.ready)],
            ["Paused", count(counts.paused)],
            ["All requests", shard.total === undefined ? count(shard.requests.length) : count(shard.total)],
          ]}
        />
      )}
      {hidden && <p class="note">The queue is longer than what is shown: the {count(1000)} best-ranked requests.</p>}
      <Picture
        label={`Requests of shard ${shard.shard}`}
        requests={shard.requests}
        missing={hidden || shard.problem ? "unknown" : "ended"}
        onPick={(id) => (location.href = requestLink(id))}
      />
      <Legend />
      {shard.policy !== undefined && <Requests requests={shard.requests} />}
    </section>
  );
}

function Requests({ requests }: { requests: readonly Request[] }) {
  const [rows, setRows] = useState(ROWS);
  if (!requests.length) return <p>No request is waiting or running.</p>;
  const levels = requests.some((request) => request.level !== null);
  return (
    <>
      <div class="wide" tabIndex={0} role="region" aria-label="Table of requests">
        <table>
          <caption>Requests, the next to run first</caption>
          <thead>
            <tr>
              <th scope="col">Request</th>
              <th scope="col">State</th>
              {levels && <th scope="col" class="number">Level</th>}
              <th scope="col" class="number">Age</th>
              <th scope="col" class="number">Tokens</th>
              <th scope="col">Worker</th>
              <th scope="col">Tenant</th>
            </tr>
          </thead>
          <tbody>
            {requests.slice(0, rows).map((request) => (
              <tr key={request.id}>
                <th scope="row">
                  <a href={requestLink(request.id)}>{request.id}</a>
                </th>
                <td>
                  <span class={`mark ${phaseOf(request)}`} aria-hidden="true" /> {PHASES[phaseOf(request)]}
                </td>
                {levels && <td class="number">{request.level}</td>}
                <td class="number">{seconds(request.ageS)}</td>
                <td class="number">{count(request.tokens)}</td>
                <td>{request.worker}</td>
                <td>{request.tenant}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {requests.length > rows && (
        <button type="button" onClick={() => setRows(rows + 4 * ROWS)}>
          Show more ({count(requests.length - rows)} left)
        </button>
      )}
    </>
  );
}
