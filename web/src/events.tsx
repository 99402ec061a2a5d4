// Events: the list, one event with its people and its proof, the screen, and entry with a code.
import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { admin, ago, api, attempt, bytes, changed, clock, count, get, me, now, post, Problem, sizeOf, whoami } from "./api";
import { verify } from "./draw";
import { Loading, Pages, Table, useLoad } from "./parts";

type GrantState = "join" | "waiting" | "open" | "over";
interface Grant { state: GrantState; holder: string; devices: string[]; until: number | null; reasons: string[] }
interface Person { name: string; member: boolean; standing: string | null; tickets: number; asked: boolean; ended: string | null; reason: string; rank: number; grant: GrantState | null }
interface Mine { name: string; standing: string | null; receipt: string; ended: string | null; reason: string; rank: number; join: string; grant: Grant | null }
interface Event {
  event: string; title: string; state: string; rule: string; places: number; closes: string; approval: string;
  devices: number; memory_bytes: number | null; minutes: number; opened_at: number; closed_at: number | null; closed_by: string; enrolled: number;
  waiting: number; requests: number; remaining: number; struck_out: number; wrong_codes: number; commitment: string;
  list_hash: string; seed: string; winners: string[]; people: Person[]; more: boolean; mine: Mine | null;
}

export function Events() {
  const after = useSignal(""); // the last event of the page before
  const { value, error } = useLoad<{ events: Event[]; more: boolean }>(`/v1/events${after.value && `?after=${after.value}`}`, "events");
  if (!value) return <Loading error={error} title="Events" />;
  return (
    <>
      <h1>Events</h1>
      <p class="quiet">An event grants places to some of those who ask. People enrol by a code on a screen; a rule chooses among their requests.</p>
      <Table caption="Events, the newest first" empty="No event yet." heads={["event", "state", "rule", "places", "enrolled", "requests", "granted"]}
        rows={value.events.map((e) => [<a href={`/event/${e.event}`}>{e.title}</a>, e.state, e.rule, e.places, e.enrolled, e.requests,
          e.winners.length > 5 ? `${e.winners.slice(0, 5).join(", ")} and ${e.winners.length - 5} more` : e.winners.join(", ") || "–"])} />
      {(after.value || value.more) && <p class="actions">
        {after.value && <button onClick={() => (after.value = "")}>Newest events</button>}
        {value.more && <button onClick={() => (after.value = value.events.at(-1)!.event)}>Older events</button>}
      </p>}
      <p><a class="button" href="/enrol">Enter the code of a screen</a></p>
      {admin() && <Open />}
    </>
  );
}

const RULES = [
  ["draw", "chance"], ["first-come", "the earliest"], ["least-waiting", "the shortest"], ["fair-share", "who used least"], ["priority", "who waited longest"],
] as const;

function Open() {
  const open = (form: HTMLFormElement) => attempt(async () => {
    const given = new FormData(form);
    const text = (name: string) => String(given.get(name) ?? "");
    const conditions = [];
    if (text("closes")) conditions.push({ kind: "time", value: new Date(text("closes")).getTime() / 1000 });
    if (text("asked")) conditions.push({ kind: "requests", value: Number(text("asked")) });
    if (text("free")) conditions.push({ kind: "devices", value: Number(text("free")) });
    const memory = text("memory") ? sizeOf(text("memory")) : null;
    if (Number.isNaN(memory)) throw new Problem(400, `${text("memory")} is no size; write 8GiB`, []);
    const made = await post<Event>("/v1/events", {
      title: text("title"), places: Number(text("places")), rule: text("rule"), approval: text("approval"),
      minutes: Number(text("minutes")), devices: Number(text("devices")), memory_bytes: memory, conditions,
    });
    location.assign(`/event/${made.event}`);
  });
  return (
    <section>
      <h2>Open an event</h2>
      <form class="row" onSubmit={(e) => { e.preventDefault(); open(e.currentTarget); }}>
        <label>Title <input name="title" required maxLength={80} /></label>
        <label>Places <input name="places" type="number" min={1} max={10000} value={1} /></label>
        <label>Rule <select name="rule">{RULES.map(([rule, prefers]) => <option value={rule}>{rule}: {prefers}</option>)}</select></label>
        <label>Approved <select name="approval"><option value="everyone">everyone with the code</option><option value="members">members; guests by hand</option><option value="hand">all by hand</option></select></label>
        <fieldset>
          <legend>Each place gives</legend>
          <label>Devices <input name="devices" type="number" min={1} max={32} value={1} /></label>
          <label>Memory <input name="memory" placeholder="any" size={8} /></label>
          <label>Minutes <input name="minutes" type="number" min={1} max={10080} value={60} /></label>
        </fieldset>
        <fieldset>
          <legend>Closes by your word, or earlier</legend>
          <label>at a time <input name="closes" type="datetime-local" /></label>
          <label>with requests <input name="asked" type="number" min={1} max={10000} /></label>
          <label>with devices free <input name="free" type="number" min={1} max={10000} /></label>
        </fieldset>
        <p><button class="main">Open</button></p>
      </form>
    </section>
  );
}

export function EventPage({ event }: { event: string }) {
  const first = useSignal(0);
  const { value, error } = useLoad<Event>(`/v1/events/${encodeURIComponent(event)}?first=${first.value}`, `event ${event}`);
  if (!value) return <Loading error={error} title={`Event ${event}`} />;
  const act = (what: string) => attempt(() => post(`/v1/events/${event}/${what}`));
  const open = value.state === "open";
  return (
    <>
      <h1>{value.title}</h1>
      <div class="cards">
        <div><b>{value.state}</b>{value.closed_at ? `closed ${clock(value.closed_at)}, by ${value.closed_by}` : `closes ${value.closes}`}</div>
        <div><b>{value.enrolled}</b>enrolled{value.waiting ? `, ${value.waiting} wait for approval` : ""}</div>
        <div><b>{value.requests}</b>requests{value.closed_at ? `: ${value.remaining} took part, ${value.struck_out} struck out` : ""}</div>
        <div><b>{value.places}</b>{value.places === 1 ? "place" : "places"} by {value.rule}: {count(value.devices, "device")}
          {value.memory_bytes !== null && `, ${bytes(value.memory_bytes)}`} for {ago(value.minutes * 60)}</div>
      </div>
      {admin() && (open || value.state === "closed") && (
        <p class="actions">
          {open && <a class="button main" href={`/event/${event}/screen`}>Show the screen</a>}
          {open && <button onClick={() => act("close")}>Close</button>}
          <button onClick={() => act("draw")}>{value.rule === "draw" ? "Draw now" : "Grant now"}</button>
          <button onClick={() => confirm(`End “${value.title}” without a result?`) && act("cancel")}>Cancel the event</button>
        </p>
      )}
      {value.wrong_codes > 20 && admin() && <p class="trouble">{value.wrong_codes} wrong codes were entered. None was accepted.</p>}
      <Own event={value} />
      {value.winners.length > 0 && <section aria-live="polite"><h2>Granted</h2><ol>{value.winners.map((w) => <li><b>{w}</b></li>)}</ol></section>}
      <h2>People</h2>
      <Table caption="People of the event" empty="Nobody has enrolled yet. People scan the code on the screen."
        heads={["name", "approval", "request", "rank", "result"]}
        rows={value.people.map((p) => [
          p.name,
          p.standing === "waiting" && open && admin()
            ? <span class="actions"><button class="main" onClick={() => attempt(() => post(`/v1/events/${event}/decide`, { name: p.name, approve: true }))}>Approve {p.name}</button>
              <button aria-label={`Refuse ${p.name}`} onClick={() => attempt(() => post(`/v1/events/${event}/decide`, { name: p.name, approve: false }))}>Refuse</button></span>
            : p.standing ?? "not enrolled",
          p.asked ? "yes" : "–", p.rank || "", p.reason ? `${p.ended}: ${p.reason}` : p.grant ? <b class="good">{GRANTED[p.grant]}</b> : p.ended ?? "",
        ])} />
      <Pages first={first} following={value.more ? first.value + value.people.length : null} what="People" />
      {value.commitment && <Proof event={value} />}
    </>
  );
}

function Own({ event }: { event: Event }) {
  const mine = event.mine;
  const ask = () => attempt(async () => {
    const own = [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");
    await post(`/v1/events/${event.event}/requests`, { own });
  });
  const open = event.state === "open";
  return (
    <section aria-live="polite">
      {mine && <p>You are <b>{mine.name}</b>: {mine.standing ?? "not enrolled"}{mine.ended ? <>, <b>{mine.ended}</b>{mine.reason && ` (${mine.reason})`}</> : ""}.</p>}
      {open && !mine?.receipt && (me.value ? <button class="main" onClick={ask}>Ask for a place</button> : <p><a class="button main" href="/enrol">Enter the code of the screen</a></p>)}
      {open && mine?.receipt && !mine.ended && <button onClick={() => attempt(() => api("DELETE", `/v1/events/${event.event}/requests`))}>Withdraw</button>}
      {mine?.receipt && <p>Keep your receipt: <code class="hash">{mine.receipt}</code></p>}
      {mine?.grant && <Place grant={mine.grant} join={mine.join} event={event} />}
    </section>
  );
}

/** What somebody who was granted a place has of the pool, and how to use it. */
function Place({ grant, join, event }: { grant: Grant; join: string; event: Event }) {
  const what = `${count(event.devices, "device")} for ${ago(event.minutes * 60)}`;
  return (
    <div class="trouble fine">
      {grant.state === "join" && (join
        ? <><p>You have a place: {what}, from the moment you join. On your machine, join the pool with</p><pre>{join}</pre></>
        : <p>You have a place. This pool is open to its own machine only, so ask its owner how to use it.</p>)}
      {grant.state === "waiting" && <><p>You have a place. It waits for devices, and its time has not begun.</p><ul>{grant.reasons.map((text) => <li>{text}</li>)}</ul></>}
      {grant.state === "open" && <p>You have a place: <b>{grant.devices.join(", ")}</b> until <b>{clock(grant.until!)}</b>. The next program of {grant.holder} gets it: <code>shoal run -- python …</code></p>}
      {grant.state === "over" && <p>Your place is over.</p>}
    </div>
  );
}

/** What the table of people says of a granted place. */
const GRANTED = { join: "granted: has a code to join with", waiting: "granted: waits for devices", open: "granted: has its devices", over: "granted: over" };

function Proof({ event }: { event: Event }) {
  const told = useSignal("");
  const check = async () => {
    try {
      const text = await get<string>(`/v1/events/${event.event}/proof`);
      const found = verify(text);
      const receipt = event.mine?.receipt;
      const there = receipt ? (found.receipts.includes(receipt) ? " Your receipt is among its entries." : " Your receipt is NOT among its entries.") : "";
      told.value = `This browser recomputed the draw: ${found.winners.join(", ") || "nobody"} — it is right.${there}`;
    } catch (error) {
      told.value = `The proof is wrong: ${(error as Error).message}`;
    }
  };
  return (
    <section>
      <h2>Proof</h2>
      <p>Commitment, from the opening: <code class="hash">{event.commitment}</code></p>
      {event.list_hash && <p>List, from the close: <code class="hash">{event.list_hash}</code></p>}
      {event.seed && <p>Seed: <code class="hash">{event.seed}</code></p>}
      {event.seed && <p><button onClick={check}>Check it here</button> <a href={`/v1/events/${event.event}/proof`} download={`${event.event}.txt`}>Download the proof</a></p>}
      <p role="status" id="verdict">{told.value}</p>
    </section>
  );
}

const PAUSE_S = 10; // of the head, between the list and the draw

export function Screen({ event }: { event: string }) {
  const shown = useSignal<{ code: string; valid_s: number; link: string; qr: string } | null>(null);
  const until = useSignal(0);
  const { value, error } = useLoad<Event>(`/v1/events/${encodeURIComponent(event)}`, `event ${event}`);
  useEffect(() => {
    let timer = 0;
    const next = () => get<NonNullable<typeof shown.value>>(`/v1/events/${event}/screen`).then((found) => {
      shown.value = found;
      until.value = Date.now() / 1000 + found.valid_s;
      timer = window.setTimeout(next, found.valid_s * 1000 + 100);
    }, () => (timer = window.setTimeout(next, 1000)));
    next();
    return () => clearTimeout(timer);
  }, [event]);
  if (!value) return <Loading error={error} title={`Event ${event}`} />;
  const open = value.state === "open";
  return (
    <div class="screen">
      <h1>{value.title}</h1>
      {value.state === "closed" && value.closed_at && <p class="big" role="status">closed; the result follows{value.rule === "draw" && ` in ${Math.max(0, Math.ceil(value.closed_at + PAUSE_S - now.value))} s`}</p>}
      {open && shown.value && <>
        <img src={shown.value.qr} alt={`QR code of ${shown.value.link}`} />
        <p class="code">{shown.value.code}</p>
        <p>Scan it, open <b>{shown.value.link.split("#")[0]}</b>, or type <code>shoal enrol {shown.value.code}</code></p>
        <p class="quiet">another code in {Math.max(0, Math.ceil(until.value - now.value))} s</p>
      </>}
      <p class="big"><b>{value.enrolled}</b> enrolled · <b>{value.requests}</b> requests · <b>{value.places}</b> places</p>
      <div aria-live="polite">{value.winners.length > 0 && <><h2>Granted</h2><ol class="winners">{value.winners.map((w) => <li>{w}</li>)}</ol></>}</div>
      {!open && <p class="quiet">{value.state === "cancelled" ? "cancelled: there is no result" : value.state}{value.closed_at && `, closed ${ago(now.value - value.closed_at)} ago by ${value.closed_by}`}</p>}
      {value.commitment && <p class="hash">commitment {value.commitment}{value.list_hash && <><br />list {value.list_hash}</>}</p>}
      <p><a href={`/event/${event}`}>Back</a></p>
    </div>
  );
}

export function Enrol() {
  const code = useSignal(/^#([0-9A-Za-z-]{14,20})$/.exec(location.hash)?.[1] ?? "");
  const name = useSignal("");
  useEffect(() => history.replaceState(null, "", location.pathname), []); // no code stays in the history
  const stranger = !me.value;
  const enrol = () => attempt(async () => {
    const found = await post<{ event: string }>("/v1/enrol", { code: code.value, name: name.value });
    await whoami();
    changed("all");
    location.assign(`/event/${found.event}`);
  });
  return (
    <section>
      <h1>Enrol</h1>
      <p class="quiet">Enter the code that the event's screen shows now. It changes every 30 seconds.</p>
      <form onSubmit={(e) => { e.preventDefault(); enrol(); }}>
        <label>Code on the screen <input name="code" required autoComplete="off" value={code.value} onInput={(e) => (code.value = e.currentTarget.value)} /></label>
        {stranger && <label>Your name <input name="name" required maxLength={24} value={name.value} onInput={(e) => (name.value = e.currentTarget.value)} /></label>}
        <button class="main">Enrol</button>
      </form>
    </section>
  );
}
