import type { Snapshot, Worker } from "../model";
import { Problem, count, percent } from "../parts";

export function WorkersView({ snapshot }: { snapshot: Snapshot }) {
  if (!snapshot.seesAll) {
    return (
      <>
        <h1>Workers</h1>
        <p>Only operators see the workers: tenants with <code>operator = true</code> in the file of keys.</p>
      </>
    );
  }
  const several = snapshot.shards.length > 1;
  const rows = snapshot.shards.flatMap((shard) => (shard.workers ?? []).map((worker) => ({ shard: shard.shard, worker })));
  return (
    <>
      <h1>Workers</h1>
      {snapshot.shards.map((shard) => shard.problem && <Problem key={shard.shard}>{shard.problem}</Problem>)}
      {!rows.length && snapshot.shards.every((shard) => shard.workers) && <p>No worker is connected.</p>}
      {rows.length > 0 && (
        <div class="wide" tabIndex={0} role="region" aria-label="Table of workers">
          <table>
            <caption>Workers and their rounds</caption>
            <thead>
              <tr>
                <th scope="col">Worker</th>
                {several && <th scope="col">Shard</th>}
                <th scope="col">State</th>
                <th scope="col">Slots</th>
                <th scope="col" class="number">Assigned</th>
                <th scope="col" class="number">Rounds</th>
                <th scope="col" class="number">Tokens/s</th>
                <th scope="col">Acceptance</th>
                <th scope="col">KV in use</th>
              </tr>
            </thead>
            <tbody>
              {rows.map(({ shard, worker }) => (
                <tr key={`${shard}/${worker.id}`}>
                  <th scope="row">
                    {worker.name || worker.id} <small>{worker.device}</small>
                  </th>
                  {several && <td>{shard}</td>}
                  <td>{stateOf(worker)}</td>
                  <td>
                    <Slots worker={worker} />
                  </td>
                  <td class="number">{count(worker.listed)}</td>
                  <td class="number">{count(worker.rounds)}</td>
                  <td class="number">{worker.tokens_per_s.toFixed(1)}</td>
                  <td>
                    <Meter label="Acceptance" share={worker.acceptance} />
                  </td>
                  <td>
                    <Meter label="KV in use" share={worker.blocks ? 1 - worker.free_blocks / worker.blocks : 0} />
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  );
}

function stateOf(worker: Worker): string {
  if (!worker.connected) return "not connected";
  return worker.draining ? "draining" : "connected";
}

/** One box for each slot, up to 32; the text has the numbers. */
function Slots({ worker }: { worker: Worker }) {
  const boxes = Math.min(worker.slots, 32);
  return (
    <>
      <span class="slots" aria-hidden="true">
        {Array.from({ length: boxes }, (_, slot) => (
          <span key={slot} class={slot < worker.running ? "slot taken" : "slot"} />
        ))}
      </span>{" "}
      {worker.running} of {worker.slots}
    </>
  );
}

function Meter({ label, share }: { label: string; share: number }) {
  return (
    <>
      <meter min={0} max={1} value={share} aria-label={label}>
        {percent(share)}
      </meter>{" "}
      {percent(share)}
    </>
  );
}
