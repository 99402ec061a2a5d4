// Tasks: the queue, and one task with every reason, what-if, its log as it grows, and its files.
import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { ago, attempt, bytes, clock, count, get, now, post, Problem, sizeOf } from "./api";
import { Loading, Pages, Table, Trouble, useLoad } from "./parts";
import type { Reason, TaskInfo, Tasked } from "./status";

interface Times { start: number; end: number | null }
interface Why {
  request: string; state: string;
  why: {
    never: boolean; reasons: Reason[]; unblock: { text: string; command: string | null }[];
    estimate: (Times & { error_ratio: number | null }) | null; bound: (Times & { assumes: string }) | null;
  };
}
const SHOWN = 200_000; // characters of a log
const FOLLOWS = "New lines appear by themselves.";
const at = (time: string) => Date.parse(time) / 1000;
const since = (time: string | null) => (time ? `${ago(now.value - at(time))} ago` : "–");
/** How a task stands, in a colour that a word says too. */
const shade = (state: string) => ({ succeeded: "good", running: "good", failed: "bad", lost: "bad", expired: "bad" })[state] ?? "";
const when = (at: number) => (at <= now.value + 1 ? "now" : `in ${ago(at - now.value)}, ${new Date(at * 1000).toLocaleTimeString([], { timeStyle: "short" })}`);

export function TaskTable({ caption, tasks, empty, help }: { caption: string; tasks: TaskInfo[]; empty: string; help?: string }) {
  return <Table caption={caption} empty={empty} help={help} heads={["place", "task", "owner", "state", "devices", "submitted", "started", "why"]}
    rows={tasks.map((t) => [t.position ?? "", <a href={`/task/${encodeURIComponent(t.id)}`}>{t.id}</a>, t.owner, <span class={shade(t.state)}>{t.state}</span>,
      t.devices.join(", ") || (t.needs ? `${t.needs.devices} × ${t.needs.kind ?? "any"}` : "–"), since(t.submitted_at), t.started_at ? since(t.started_at) : "",
      t.end_reason ?? (t.reasons.length > 1 ? `${t.reasons[0].text} (and ${t.reasons.length - 1} more)` : t.reasons[0]?.text ?? "")])} />;
}

export function Tasks() {
  const all = useSignal(false);
  const first = useSignal(0);
  const { value, error } = useLoad<Tasked>(`/v1/tasks?first=${first.value}&ended=${all.value}`, "tasks", "pool");
  if (!value) return <Loading error={error} title="Tasks" />;
  return (
    <>
      <h1>Tasks</h1>
      <label class="check"><input type="checkbox" checked={all.value} onChange={(e) => (all.value = e.currentTarget.checked)} /> also those that have ended</label>
      <TaskTable caption="Tasks, by number" tasks={value.tasks} empty={all.value ? "No task yet. This submits one:" : "No task waits or runs. This submits one:"} help="shoal submit -- python train.py" />
      <Pages first={first} following={value.following} what="Tasks by number" />
    </>
  );
}

export function Task({ id }: { id: string }) {
  const path = `/v1/tasks/${encodeURIComponent(id)}`;
  const { value, error } = useLoad<TaskInfo>(path, "tasks", "pool");
  if (!value) return <Loading error={error} title={`Task ${id}`} />;
  const act = (action: string) => attempt(() => post(`${path}/${action}`));
  const over = value.ended_at !== null;
  const waits = value.state === "waiting" || value.state === "held";
  const needs = value.needs;
  return (
    <>
      <h1>{value.name || value.id}</h1>
      <p aria-live="polite">{value.id} of {value.owner}: <b class={shade(value.state)}>{value.state}</b>{(value.attempt ?? 0) > 1 && `, attempt ${value.attempt}`}{value.end_reason && `, ${value.end_reason}`}</p>
      {!over && mine(value) && <p><button onClick={() => act("cancel")}>Cancel</button>{" "}
        {value.state === "waiting" && <button onClick={() => act("hold")}>Hold</button>}
        {value.state === "held" && <button onClick={() => act("release")}>Release</button>}</p>}
      {waits && <WhyItWaits id={value.id} task={value} />}
      <dl>
        {needs && <div><dt>Asks for</dt><dd>{count(needs.devices, "device")}{needs.kind && ` of kind ${needs.kind}`}{needs.memory_bytes ? `, ${bytes(needs.memory_bytes)} each` : ", with all its memory"}</dd></div>}
        {value.devices.length > 0 && <div><dt>Has</dt><dd>{value.devices.join(", ")}</dd></div>}
        {value.submitted_at && <div><dt>Submitted</dt><dd>{clock(at(value.submitted_at))}</dd></div>}
        {value.started_at && <div><dt>Started</dt><dd>{clock(at(value.started_at))}</dd></div>}
        {value.ended_at && <div><dt>Ended</dt><dd>{clock(at(value.ended_at))}{value.started_at && `, after ${ago(at(value.ended_at) - at(value.started_at))}`}</dd></div>}
      </dl>
      {mine(value) ? <>
        <Log path={path} key={value.id} started={Boolean(value.attempt)} />
        {value.attempt ? <Files path={path} turn={`${value.attempt} ${value.state}`} /> : null}
      </> : <p class="quiet">Only {value.owner} and admins see its command, log and files.</p>}
    </>
  );
}

/** Whether this person sees all of a task: the head leaves out what others may not see. */
const mine = (task: TaskInfo) => task.submitted_at !== null;

function WhyItWaits({ id, task }: { id: string; task: TaskInfo }) {
  const path = `/v1/why/${encodeURIComponent(id)}`;
  const { value } = useLoad<Why>(path, "tasks", "pool", "history");
  const supposed = useSignal<{ given: string; found: Why } | null>(null);
  const wrong = useSignal<Problem | null>(null);
  const ask = async (form: HTMLFormElement) => {
    const given = new FormData(form);
    const query = new URLSearchParams();
    const text = (name: string) => String(given.get(name) ?? "").trim();
    if (text("devices")) query.set("devices", text("devices"));
    if (text("kind")) query.set("kind", text("kind"));
    if (text("memory")) query.set("memory_bytes", String(sizeOf(text("memory"))));
    if (text("minutes")) query.set("limit_s", String(Number(text("minutes")) * 60));
    wrong.value = null;
    supposed.value = null;
    try {
      if (query.get("memory_bytes") === "NaN") throw new Problem(400, `${text("memory")} is no size; write 8GiB`, []);
      supposed.value = { given: [...query].map(([k, v]) => `${k} ${v}`).join(", ") || "the same", found: await get<Why>(`${path}?${query}`) };
    } catch (error) {
      wrong.value = error as Problem;
    }
  };
  return (
    <section>
      <h2>Why it waits</h2>
      {value ? <Reasons found={value} /> : <ul>{task.reasons.map((r) => <li>{r.text} <code>{r.code}</code></li>)}</ul>}
      <h2>What if it asked for something else?</h2>
      <form class="row" onSubmit={(e) => { e.preventDefault(); void ask(e.currentTarget); }}>
        <label>Devices <input name="devices" type="number" min={1} max={32} placeholder={String(task.needs?.devices ?? 1)} /></label>
        <label>Memory of each <input name="memory" placeholder={task.needs?.memory_bytes ? bytes(task.needs.memory_bytes) : "8GiB"} /></label>
        <label>Kind <input name="kind" placeholder={task.needs?.kind ?? "any"} /></label>
        <label>Minutes at most <input name="minutes" type="number" min={1} /></label>
        <p><button>Suppose</button></p>
      </form>
      <div role="status" id="supposed">
        {wrong.value && <Trouble problem={wrong.value} />}
        {supposed.value && <><p>With {supposed.value.given}:</p><Reasons found={supposed.value.found} /></>}
      </div>
    </section>
  );
}

function Reasons({ found: { why, state } }: { found: Why }) {
  return (
    <>
      {why.reasons.length ? <ul>{why.reasons.map((r) => <li>{r.text} <code>{r.code}</code></li>)}</ul> : <p>Nothing holds it back now ({state}).</p>}
      {why.unblock.length > 0 && <><p>What would help:</p><ul>{why.unblock.map((u) => <li>{u.text}{u.command && <>: <code>{u.command}</code></>}</li>)}</ul></>}
      {why.never && <p class="bad">As the pool is, it never runs; it waits, as nodes may join.</p>}
      {why.estimate && <p>Estimate: starts {when(why.estimate.start)}{why.estimate.end && `, ends ${when(why.estimate.end)}`}, if nobody else comes
        {why.estimate.error_ratio !== null && ` (past estimates were off by ${Math.round(why.estimate.error_ratio * 100)} %)`}.</p>}
      {why.bound && <p>Bound: starts {when(why.bound.start)} at the earliest{why.bound.end && `, ends ${when(why.bound.end)}`}, if {why.bound.assumes}.</p>}
    </>
  );
}

/** The log as it grows. It goes on where it was if the connection or the web process ends. */
function Log({ path, started }: { path: string; started: boolean }) {
  const place = useRef<HTMLPreElement>(null);
  const follows = useSignal(true);
  const told = useSignal("…");
  useEffect(() => {
    let source: EventSource;
    let last = "";
    let timer = 0;
    const write = (text: string) => {
      const pre = place.current;
      if (!pre) return;
      pre.append(text);
      while ((pre.textContent?.length ?? 0) > SHOWN && pre.childNodes.length > 1) pre.firstChild!.remove();
      if (follows.value) pre.scrollTop = pre.scrollHeight;
    };
    const on = (name: string, act: (data: Record<string, string>) => void) =>
      source.addEventListener(name, (event) => {
        last = event.lastEventId || last;
        act(JSON.parse(event.data));
      });
    const over = (text: string) => {
      source.close();
      told.value = text;
    };
    const open = () => {
      source = new EventSource(`${path}/log/stream?from=${encodeURIComponent(last)}`);
      source.onopen = () => (told.value = FOLLOWS);
      source.onerror = () => {
        told.value = "Not connected now. It goes on by itself.";
        if (source.readyState === EventSource.CLOSED) timer = window.setTimeout(open, 1000);
      };
      on("begin", () => place.current?.replaceChildren());
      on("text", ({ text }) => write(text));
      on("attempt", ({ attempt }) => write(`\n--- attempt ${attempt} ---\n`));
      on("end", ({ state }) => over(`The end: ${state}.`));
      on("refused", ({ text }) => over(text));
    };
    open();
    return () => {
      clearTimeout(timer);
      source.close();
    };
  }, [path]);
  return (
    <section>
      <h2>Log</h2>
      <pre ref={place} class="log" tabIndex={0} aria-label="Log" role="region" hidden={!started} />
      <p class="quiet" id="log-state">{!started && told.value === FOLLOWS ? "The program has not started. What it writes appears here." : told.value}</p>
      {started && <label class="check"><input type="checkbox" checked={follows.value} onChange={(e) => (follows.value = e.currentTarget.checked)} /> Stay at the end</label>}
    </section>
  );
}

interface FileInfo { path: string; size_bytes: number }

function Files({ path, turn }: { path: string; turn: string }) {
  const found = useSignal<{ files: FileInfo[]; following: number | null; told: string }>({ files: [], following: null, told: "…" });
  const look = (first: number) => get<{ files: FileInfo[]; following: number | null }>(`${path}/files?first=${first}`).then(
    ({ files, following }) => (found.value = { files: first ? [...found.value.files, ...files] : files, following, told: "It keeps no files. Name them when you submit it: shoal submit --keep 'runs/**'" }),
    (error) => (found.value = { files: [], following: null, told: (error as Problem).message }),
  );
  useEffect(() => void look(0), [path, turn]);
  const { files, following, told } = found.value;
  return (
    <section>
      <h2>Files</h2>
      <Table caption="Files that were kept" empty={told} heads={["file", "size"]}
        rows={files.map((f) => [<a href={`${path}/file?path=${encodeURIComponent(f.path)}`} download>{f.path}</a>, bytes(f.size_bytes)])} />
      {following !== null && <button onClick={() => look(following)}>More files</button>}
    </section>
  );
}
