// The pool's memory as one picture: who has which bytes on which device, in host memory, on disk.
import { bytes, colour } from "./api";
import { Bar, Key, Loading, Table, useLoad } from "./parts";
import { Client, Program } from "./pool";
import { address, kept, places, type Session, short, type Status } from "./status";

interface Piece { session?: Session; size: number; granted?: number }

export function Memory() {
  const { value, error } = useLoad<Status>("/v1/pool", "pool", "history");
  if (!value) return <Loading error={error} title="Memory" />;
  const where = (node: string) => value.sessions.filter((s) => value.devices.find((d) => d.number === s.device)?.node === node);
  const nodes = [...new Set(value.devices.map((d) => d.node))];
  const most = Math.max(1, ...value.devices.map((d) => d.memory_bytes), ...nodes.map((n) => sum(where(n), "host")), ...nodes.map((n) => sum(where(n), "disk")));
  return (
    <>
      <h1>Memory</h1>
      <p class="quiet">All memory of the pool is one address space. This is where each client's bytes are. What does not fit a device is in host memory, then on disk; a copy there may also still be on the device.</p>
      <AddressSpace status={value} />
      <h2>Room</h2>
      <Key items={[["box", "in use"], ["box pale", "granted"], ["box pale grey", "kept for a place or a task"]]} text="A colour for each client. All bars have one scale." />
      {!nodes.length && <p class="quiet">The pool has no device now.</p>}
      {nodes.map((node) => (
        <section>
          <h3>Node {node}</h3>
          <div class="grid">
            {value.devices.filter((d) => d.node === node).map((d) => (
              <Strip name={d.name} link={`/device/${d.number}`} scale={most} length={d.memory_bytes}
                text={`${bytes(d.memory_bytes - d.free_bytes)} of ${bytes(d.memory_bytes)} granted`}
                pieces={[...value.sessions.filter((s) => s.device === d.number).map((s) => ({ session: s, size: Math.min(places(s).device, s.granted_bytes), granted: s.granted_bytes })), { size: 0, granted: kept(d, value.sessions) }]} />
            ))}
            <Strip name="host memory" scale={most} length={sum(where(node), "host")} text={`${bytes(sum(where(node), "host"))} of evicted segments`}
              pieces={where(node).map((s) => ({ session: s, size: places(s).host }))} />
            <Strip name="disk" scale={most} length={sum(where(node), "disk")} text={`${bytes(sum(where(node), "disk"))} of evicted segments`}
              pieces={where(node).map((s) => ({ session: s, size: places(s).disk }))} />
          </div>
        </section>
      ))}
      <h2>Sessions</h2>
      <Table caption="Who has which bytes" empty="Nobody holds memory now." heads={["client", "program", "device", "granted", "on the device", "in host memory", "on disk", "peak", "addresses from"]}
        rows={value.sessions.map((s) => [<Client name={s.client} />, <Program program={s.program} />,
          value.devices.find((d) => d.number === s.device)?.name ?? s.device, bytes(s.granted_bytes), bytes(places(s).device), bytes(places(s).host),
          bytes(places(s).disk), s.profile ? bytes(s.profile.peak_bytes) : "–", <code title={address(s.session)}>{address(s.session).slice(0, 5)}…</code>])} />
    </>
  );
}

const sum = (sessions: Session[], place: "host" | "disk") => sessions.reduce((all, s) => all + places(s)[place], 0);

function Strip({ name, link, scale, length, text, pieces }: { name: string; link?: string; scale: number; length: number; text: string; pieces: Piece[] }) {
  const parts = pieces.flatMap(({ session: s, size, granted }) => {
    if (!s) return [{ size: granted ?? 0, colour: "var(--quiet)", title: `${bytes(granted ?? 0)} kept for a place of an event, or a task`, pale: true }];
    const title = `${s.client} ${short(s.program)}: ${bytes(size)}${granted === undefined ? "" : ` of ${bytes(granted)}`}`;
    return [{ size, colour: colour(s.client), title }, { size: (granted ?? size) - size, colour: colour(s.client), title, pale: true }];
  });
  return (
    <>
      {link ? <a href={link}>{name}</a> : <span>{name}</span>}
      <div>
        <div style={{ width: `${Math.max(1, (length / scale) * 100)}%` }}><Bar parts={parts} total={length} label={`${name}: ${text}`} /></div>
        <span class="quiet">{text}{pieces.some((p) => p.size) && `: ${pieces.filter((p) => p.size).map((p) => `${p.session?.client} ${bytes(p.size)}`).join(", ")}`}</span>
      </div>
    </>
  );
}

interface Stretch { at: number; width: number; session: Session; place: string; size: number }

/** The address space from left to right, a row for each place: a stretch of it is drawn where its bytes are. */
function AddressSpace({ status }: { status: Status }) {
  const device = (number: number) => status.devices.find((d) => d.number === number);
  const sessions = [...status.sessions].sort((a, b) => a.session - b.session || a.lease - b.lease || a.device - b.device);
  const rows = new Map<string, { name: string; link?: string; stretches: Stretch[] }>();
  const nodes = [...new Set(status.devices.map((d) => d.node))];
  for (const node of nodes) {
    for (const d of status.devices.filter((one) => one.node === node)) rows.set(`d${d.number}`, { name: d.name, link: `/device/${d.number}`, stretches: [] });
    for (const place of ["host memory", "disk"]) rows.set(`${place} ${node}`, { name: nodes.length > 1 ? `${place}, ${node}` : place, stretches: [] });
  }
  const ranges: { at: number; width: number; session: Session }[] = [];
  let end = 0;
  for (const s of sessions) {
    const node = device(s.device)?.node, has = places(s);
    const where = [[`d${s.device}`, has.device], [`host memory ${node}`, has.host], [`disk ${node}`, has.disk]] as const;
    const last = ranges.at(-1);
    const range = last?.session.lease === s.lease ? last : { at: end, width: 0, session: s };
    if (range !== last) ranges.push(range);
    for (const [key, size] of where) {
      if (size) rows.get(key)?.stretches.push({ at: end, width: size, session: s, place: key, size });
      end += size;
      range.width += size;
    }
  }
  if (!end) return <p class="quiet">No tensor has an address now.</p>;
  const x = (at: number) => (at / end) * 1000;
  return (
    <figure class="space">
      <div class="grid gantt">
        {[...rows.values()].map(({ name, link, stretches }) => {
          const told = stretches.map((one) => `${one.session.client} ${bytes(one.size)} from ${address(one.session.session)}`).join(", ");
          return <>
            {link ? <a href={link}>{name}</a> : <span>{name}</span>}
            <svg viewBox="0 0 1000 24" role="img" preserveAspectRatio="none" aria-label={`Addresses on ${name}: ${told || "none"}`}>
              <rect class="back" width="1000" height="24" />
              {stretches.map((one) => (
                <rect x={x(one.at)} width={Math.max(3, x(one.width))} y="2" height="20" fill={colour(one.session.client)}>
                  <title>{`${one.session.client} ${short(one.session.program)}: ${bytes(one.size)} on ${name}, from ${address(one.session.session)}`}</title>
                </rect>
              ))}
              {ranges.slice(1).map((range) => <line x1={x(range.at)} x2={x(range.at)} y2="24" stroke="var(--back)" stroke-width="2" vector-effect="non-scaling-stroke" />)}
            </svg>
          </>;
        })}
      </div>
      <ol class="ranges key quiet" aria-label="Addresses from left to right">
        {ranges.map(({ width, session }) => <li><code>{address(session.session)}</code> <Client name={session.client} /> <Program program={session.program} /> {bytes(width)}</li>)}
      </ol>
      <figcaption>From left to right: what programs have in their addresses, to scale, without the gaps between them. A program's own addresses are drawn by place; <code>shoal.memory.map()</code> in it names each tensor.</figcaption>
    </figure>
  );
}
