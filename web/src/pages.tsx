// People, approvals, audit, doctor.
import { useSignal } from "@preact/signals";
import { admin, ago, api, attempt, bytes, clock, count, me, post, Problem, sizeOf } from "./api";
import { Loading, Table, useLoad } from "./parts";

interface Member { name: string; role: string; joined: number; expires: number; revoked: number | null; devices_max: number | null; memory_bytes_max: number | null; leases: number; used_device_s: number }
interface TokenInfo { token_id: string; owner: string; label: string; kind: string; scope: string; made: number; expires: number }

export function People() {
  const tokens = useLoad<{ tokens: TokenInfo[] }>("/v1/tokens", "access");
  return (
    <>
      <h1>People</h1>
      {admin() ? <Members /> : <p class="quiet">Only admins see who has joined, and make join codes.</p>}
      <ApproveForm />
      <h2>Tokens and browsers</h2>
      <p class="quiet">Who can reach the pool over HTTP. This makes a token for a program: <code>shoal token make LABEL</code></p>
      <Table caption="Tokens and browser sessions" empty="None." heads={["owner", "kind", "scope", "label", "made", "until", "action"]}
        rows={(tokens.value?.tokens ?? []).map((t) => [t.owner, t.kind, t.scope, t.label, clock(t.made), clock(t.expires),
          <button onClick={() => attempt(() => api("DELETE", `/v1/tokens/${t.token_id}`))}>End {t.token_id}</button>])} />
    </>
  );
}

/** What admins see of people: who waits, who has joined, and codes for those who shall. */
function Members() {
  const members = useLoad<{ clients: Member[] }>("/v1/members", "pool", "access");
  const events = useLoad<{ events: { event: string; title: string; waiting: number }[] }>("/v1/events", "events").value;
  const code = useSignal<{ command: string; qr: string; expires: number } | null>(null);
  const make = (form: HTMLFormElement) => attempt(async () => {
    const given = new FormData(form);
    const text = (name: string) => String(given.get(name) ?? "").trim();
    const memory = text("memory") ? sizeOf(text("memory")) : null;
    if (Number.isNaN(memory)) throw new Problem(400, `${text("memory")} is no size; write 8GiB`, []);
    code.value = await post("/v1/codes", { role: text("role"), ttl_s: 600, devices_max: text("devices") ? Number(text("devices")) : null, memory_bytes_max: memory });
  });
  return (
    <>
      {events?.events.filter((e) => e.waiting).map((e) => <p class="trouble"><a href={`/event/${e.event}`}>{e.waiting === 1 ? "1 person waits" : `${e.waiting} people wait`} for approval in “{e.title}”</a></p>)}
      <h2>Members and nodes</h2>
      {members.value
        ? <Table caption="Clients and nodes" empty="Nobody has joined yet. They join with a code from here:" help="shoal join CODE@HOST" heads={["name", "role", "joined", "quota", "leases", "used", "action"]}
          rows={members.value.clients.map((m) => [m.name, m.role, clock(m.joined),
            m.role === "node" ? "–" : quota(m), m.leases, m.used_device_s ? `${ago(m.used_device_s)} of a device` : "–",
            m.revoked ? "revoked" : <button onClick={() => confirm(`Revoke ${m.name}?`) && attempt(() => post(`/v1/members/${m.name}/revoke`))}>Revoke {m.name}</button>])} />
        : <Loading error={members.error} />}
      <section>
        <h2>Join codes</h2>
        <form class="row" onSubmit={(e) => { e.preventDefault(); void make(e.currentTarget); }}>
          <label>For <select name="role"><option value="user">a user</option><option value="submitter">a submitter</option>{me.value?.role === "owner" && <option value="admin">an admin</option>}<option value="node">a node</option></select></label>
          <label>Devices at most <input name="devices" type="number" min={0} max={10000} placeholder="any" /></label>
          <label>Memory at most <input name="memory" placeholder="any" size={8} /></label>
          <p><button class="main">Make a code</button></p>
        </form>
        {code.value && <div role="status"><img width="220" src={code.value.qr} alt="QR code of the join code" /><pre>{code.value.command}</pre><p class="quiet">Valid once, until {clock(code.value.expires)}.</p></div>}
      </section>
    </>
  );
}

const quota = (m: Member) => [m.devices_max !== null && count(m.devices_max, "device"), m.memory_bytes_max !== null && bytes(m.memory_bytes_max)].filter(Boolean).join(", ") || "no limit";

/** Signs in a browser that shows six digits. Its QR code leads a phone here, with the digits behind the #. */
export function Approve() {
  return <><h1>Sign in a browser</h1><ApproveForm /></>;
}

function ApproveForm() {
  const digits = useSignal(/^#(\d{6})$/.exec(location.hash)?.[1] ?? "");
  const done = useSignal("");
  const approve = () => attempt(async () => {
    const found = await post<{ text: string }>(`/v1/browsers/${digits.value.replace(/\D/g, "")}/approve`);
    done.value = found.text;
  });
  return (
    <section>
      <h2>A browser asks to sign in</h2>
      <p>Approve it only if it is yours: it gets all your rights.</p>
      <form class="row" onSubmit={(e) => { e.preventDefault(); void approve(); }}>
        <label>Its six digits <input inputMode="numeric" required value={digits.value} onInput={(e) => (digits.value = e.currentTarget.value)} /></label>
        <p><button class="main">Sign it in as {me.value?.name}</button></p>
      </form>
      <p role="status">{done.value}</p>
    </section>
  );
}

export function Audit() {
  const { value, error } = useLoad<{ entries: { at: number; actor: string; action: string; detail: string; number: number; hash: string }[] }>("/v1/audit?count=200", "pool", "tasks", "events", "access");
  if (!value) return <Loading error={error} title="Audit" />;
  return (
    <>
      <h1>Audit</h1>
      <p class="quiet">The last 200 entries, the newest first. Each has the hash of the one before it: <code>shoal audit verify</code> recomputes all of them.
        Note the newest hash to prove later that nothing before it was changed.</p>
      <Table caption="Audit entries, the newest first" empty="Nothing yet." heads={["when", "who", "what", "detail", "hash"]}
        rows={[...value.entries].reverse().map((e) => [clock(e.at), e.actor, e.action, e.detail, <code class="hash" title={e.hash}>{e.hash.slice(0, 12)}</code>])} />
    </>
  );
}

export function Doctor() {
  const { value, error } = useLoad<{ checks: { name: string; ok: boolean; text: string; help: string }[] }>("/v1/doctor", "pool", "history");
  if (!value) return <Loading error={error} title="Doctor" />;
  const wrong = value.checks.filter((c) => !c.ok).length;
  return (
    <>
      <h1>Doctor</h1>
      {wrong ? <p class="trouble">{count(wrong, "check")} found something. The last column says what to type.</p> : <p class="good">All {value.checks.length} checks are good.</p>}
      <Table caption="Checks" empty="" heads={["check", "verdict", "found", "to type"]}
        rows={value.checks.map((c) => [c.name, <b class={c.ok ? "good" : "bad"}>{c.ok ? "good" : "bad"}</b>, c.text, c.help ? <code>{c.help}</code> : ""])} />
    </>
  );
}
