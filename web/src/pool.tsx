// The pool and one device: memory and load over time, who is there, and what waits.
import { ago, bytes, clock, colour, count, now } from "./api";
import { Bar, Chart, Gantt, Key, Loading, Spark, Table, useLoad } from "./parts";
import { type Dev, type History, kept, places, type Profiles, type Session, short, type Status, type Tasked, taskOf } from "./status";
import { TaskTable } from "./tasks";

const WINDOW_S = 3600; // the head keeps that much
const LEAST_S = 180;

/** When the charts begin: an hour ago, or when the pool started. */
const since = (status: Status) => Math.max(now.value - WINDOW_S, Math.min(status.started, now.value - LEAST_S));

export function Program({ program }: { program: string }) {
  const task = taskOf(program);
  return task ? <a href={`/task/${encodeURIComponent(task)}`} title={program}>{task}</a> : <span title={program}>{short(program)}</span>;
}

export function Pool() {
  const { value, error } = useLoad<Status>("/v1/pool", "pool", "history");
  const history = useLoad<History>("/v1/history", "history").value;
  const tasks = useLoad<Tasked>("/v1/tasks", "tasks", "pool").value;
  if (!value) return <Loading error={error} title="Pool" />;
  const names = new Map(value.devices.map((d) => [d.number, d.name]));
  const paused = new Set(value.sessions.filter((s) => s.profile?.state === "suspended").map((s) => s.session));
  const waiting = (tasks?.tasks ?? []).filter((t) => t.state === "waiting" || t.state === "held");
  const running = (tasks?.tasks ?? []).filter((t) => !waiting.includes(t));
  const free = value.devices.reduce((all, d) => all + d.free_bytes, 0);
  const from = since(value);
  return (
    <>
      <h1>Pool {value.pool}</h1>
      <div class="cards">
        <div><b>{value.nodes.filter((n) => n.state === "up").length}</b>nodes up</div>
        <div><b>{value.devices.length}</b>devices, {bytes(free)} free</div>
        <div><b>{tasks ? running.length : "–"}</b>tasks run</div>
        <div><b>{tasks ? waiting.length : "–"}</b>tasks wait</div>
      </div>
      {value.nodes.filter((n) => n.state !== "up" || n.failures.length).map((n) => (
        <p class="trouble">Node {n.name} is {n.state}. {n.failures.join("; ")} <a href="/doctor">What to do</a></p>
      ))}
      <h2>Devices</h2>
      {value.devices.length
        ? <div class="grid top">{value.devices.map((d) => <DeviceRow device={d} sessions={value.sessions} history={history} from={from} />)}</div>
        : <p class="quiet">The pool has no device now. A machine offers its own with <code>shoal node --join CODE</code>; <a href="/people">People</a> makes the code.</p>}
      {value.devices.length > 0 && <Key items={[["box", "in use"], ["box pale", "granted"], ["line", "memory in use"], ["line calls", "messages a second"]]}
        text={`Bars are memory now, a colour for each client. Charts go back ${ago(now.value - from)}.`} />}
      <h2>Sessions</h2>
      {names.size > 0 && <Gantt spans={history?.spans ?? []} names={names} from={from} paint={colour} paused={paused} />}
      <Table caption="Sessions now" empty="Nobody uses the pool now." heads={["client", "program", "device", "granted", "in use", "steps", "for"]}
        rows={value.sessions.map((s) => [<Client name={s.client} />, <Program program={s.program} />, <a href={`/device/${s.device}`}>{names.get(s.device)}</a>, bytes(s.granted_bytes),
          bytes(places(s).device), s.profile?.steps || "–", ago(now.value - s.since)])} />
      <h2>Waiting</h2>
      <TaskTable caption="Tasks that wait" tasks={waiting} empty="No task waits." />
      <h2>Running</h2>
      <TaskTable caption="Tasks that run" tasks={running} empty="No task runs. This starts one:" help="shoal submit -- python train.py" />
    </>
  );
}

export function Client({ name }: { name: string }) {
  return <><span aria-hidden="true" style={{ color: colour(name) }}>■</span> {name}</>;
}

function DeviceBar({ device, sessions }: { device: Dev; sessions: Session[] }) {
  const mine = sessions.filter((s) => s.device === device.number);
  const parts = mine.flatMap((s) => {
    const used = Math.min(places(s).device, s.granted_bytes);
    const title = `${s.client} ${short(s.program)}: ${bytes(used)} in use of ${bytes(s.granted_bytes)}`;
    return [{ size: used, colour: colour(s.client), title }, { size: s.granted_bytes - used, colour: colour(s.client), title, pale: true }];
  });
  const free = bytes(device.free_bytes);
  const aside = kept(device, sessions);
  if (aside) parts.push({ size: aside, colour: "var(--quiet)", title: `${bytes(aside)} kept for a place of an event, or a task`, pale: true });
  return (
    <>
      <Bar parts={parts} total={device.memory_bytes} label={`${device.name}: ${free} of ${bytes(device.memory_bytes)} free`} />
      <span class="quiet">{free} of {bytes(device.memory_bytes)} free{mine.length ? ` · ${[...new Set(mine.map((s) => s.client))].join(", ")}` : " · idle"}{aside > 0 && ` · ${bytes(aside)} kept`}</span>
    </>
  );
}

function DeviceRow({ device, sessions, history, from }: { device: Dev; sessions: Session[]; history: History | null; from: number }) {
  const samples = history?.devices.find((d) => d.device === device.number)?.samples ?? [];
  return (
    <>
      <div><a href={`/device/${device.number}`}>{device.name}</a><br /><span class="quiet small">{device.kind} · {device.node}</span></div>
      <div>
        <DeviceBar device={device} sessions={sessions} />
        {samples.length > 1 && <Spark name={device.name} from={from} times={samples.map((s) => s[0])} used={samples.map((s) => s[2])} calls={samples.map((s) => s[3])} total={device.memory_bytes} />}
      </div>
    </>
  );
}

export function Device({ number }: { number: number }) {
  const { value, error } = useLoad<Status>("/v1/pool", "pool", "history");
  const history = useLoad<History>(`/v1/history?device=${number}`, "history").value;
  const profiles = useLoad<Profiles>(`/v1/profiles?first=${number}`, "pool").value;
  if (!value) return <Loading error={error} title={`Device ${number}`} />;
  const device = value.devices.find((d) => d.number === number);
  if (!device) return <><h1>Device {number}</h1><p>The pool has no such device now. <a href="/">The pool's devices</a></p></>;
  const samples = history?.samples ?? [];
  const times = samples.map((s) => s[0]);
  const from = since(value);
  const profile = profiles?.devices.find((d) => d.number === number)?.profile;
  return (
    <>
      <h1>{device.name}</h1>
      <p>{device.kind} of node {device.node}, {count(device.threads, "thread")}{device.speed < 1 && `, declared speed ${device.speed}`}</p>
      <DeviceBar device={device} sessions={value.sessions} />
      <h2>Memory</h2>
      <Chart title="Memory" from={from} times={times} show={bytes} most={device.memory_bytes} lines={[
        { name: "granted", values: samples.map((s) => s[1]), colour: "#e69f00" },
        { name: "in use", values: samples.map((s) => s[2]), colour: "#0072b2" }]} />
      <h2>Load</h2>
      <Chart title="Messages a second" from={from} times={times} show={(v) => String(Math.round(v))} lines={[{ name: "messages a second", values: samples.map((s) => s[3]), colour: "#009e73" }]} />
      <h2>Sessions</h2>
      <Table caption="Sessions of this device, the newest first" empty="Nobody was here in the last hour." heads={["client", "program", "from", "for", ""]}
        rows={[...(history?.spans ?? [])].reverse().map((s) => [<Client name={s.client} />, <Program program={s.program} />, clock(s.since), ago((s.until ?? now.value) - s.since), s.until ? "" : <b>now</b>])} />
      <h2>Speed</h2>
      {profile
        ? <Table caption="Measured speed" empty="" heads={["what", "measured"]} rows={[
            ...Object.entries(profile.flops_per_s).map(([type, rate]) => [`matrix products, ${type}`, `${(rate / 1e9).toFixed(0)} GFLOP/s`]),
            ["copies in its memory", `${bytes(profile.bytes_per_s)}/s`], ["a call that computes nothing", `${(profile.call_s * 1e6).toFixed(1)} µs`],
            ...Object.entries(profile.links).map(([place, rate]) => [`copies from ${place}`, `${bytes(rate)}/s`])]} />
        : <p class="quiet">Not measured yet. The pool measures a device while it is idle; <code>shoal devices --refresh</code> does it now.</p>}
    </>
  );
}
