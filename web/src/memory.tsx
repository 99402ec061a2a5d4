// The pool's memory as one picture: who has which bytes on which device, in host memory, on disk.
import { bytes, colour } from "./api";
import { Bar, Key, Loading, Table, useLoad } from "./parts";
import { Client, Program } from "./pool";
import { places, type Session, short, type Status } from "./status";

interface Piece { session: Session; size: number; granted?: number }

export function Memory() {
  const { value, error } = useLoad<Status>("/v1/pool", "pool", "history");
  if (!value) return <Loading error={error} />;
  const where = (node: string) => value.sessions.filter((s) => value.devices.find((d) => d.number === s.device)?.node === node);
  const nodes = [...new Set(value.devices.map((d) => d.node))];
  const most = Math.max(1, ...value.devices.map((d) => d.memory_bytes), ...nodes.map((n) => sum(where(n), "host")), ...nodes.map((n) => sum(where(n), "disk")));
  return (
    <>
      <h1>Memory</h1>
      <p class="quiet">Where each client's bytes are. What does not fit a device is in host memory, then on disk; a copy there may also still be on the device.</p>
      <Key items={[["box", "in use"], ["box pale", "granted"]]} text="A colour for each client. All bars have one scale." />
      {!nodes.length && <p class="quiet">The pool has no device now.</p>}
      {nodes.map((node) => (
        <section>
          <h2>Node {node}</h2>
          <div class="grid">
            {value.devices.filter((d) => d.node === node).map((d) => (
              <Strip name={d.name} link={`/device/${d.number}`} scale={most} length={d.memory_bytes}
                text={`${bytes(d.memory_bytes - d.free_bytes)} of ${bytes(d.memory_bytes)} granted`}
                pieces={value.sessions.filter((s) => s.device === d.number).map((s) => ({ session: s, size: Math.min(places(s).device, s.granted_bytes), granted: s.granted_bytes }))} />
            ))}
            <Strip name="host memory" scale={most} length={sum(where(node), "host")} text={`${bytes(sum(where(node), "host"))} of evicted segments`}
              pieces={where(node).map((s) => ({ session: s, size: places(s).host }))} />
            <Strip name="disk" scale={most} length={sum(where(node), "disk")} text={`${bytes(sum(where(node), "disk"))} of evicted segments`}
              pieces={where(node).map((s) => ({ session: s, size: places(s).disk }))} />
          </div>
        </section>
      ))}
      <h2>Sessions</h2>
      <Table caption="Who has which bytes" empty="Nobody holds memory now." heads={["client", "program", "device", "granted", "on the device", "in host memory", "on disk", "peak"]}
        rows={value.sessions.map((s) => [<Client name={s.client} />, <Program program={s.program} />,
          value.devices.find((d) => d.number === s.device)?.name ?? s.device, bytes(s.granted_bytes), bytes(places(s).device), bytes(places(s).host),
          bytes(places(s).disk), s.profile ? bytes(s.profile.peak_bytes) : "–"])} />
    </>
  );
}

const sum = (sessions: Session[], place: "host" | "disk") => sessions.reduce((all, s) => all + places(s)[place], 0);

function Strip({ name, link, scale, length, text, pieces }: { name: string; link?: string; scale: number; length: number; text: string; pieces: Piece[] }) {
  const parts = pieces.flatMap(({ session: s, size, granted }) => {
    const title = `${s.client} ${short(s.program)}: ${bytes(size)}${granted === undefined ? "" : ` of ${bytes(granted)}`}`;
    return [{ size, colour: colour(s.client), title }, { size: (granted ?? size) - size, colour: colour(s.client), title, pale: true }];
  });
  return (
    <>
      {link ? <a href={link}>{name}</a> : <span>{name}</span>}
      <div>
        <div style={{ width: `${Math.max(1, (length / scale) * 100)}%` }}><Bar parts={parts} total={length} label={`${name}: ${text}`} /></div>
        <span class="quiet">{text}{pieces.some((p) => p.size) && `: ${pieces.filter((p) => p.size).map((p) => `${p.session.client} ${bytes(p.size)}`).join(", ")}`}</span>
      </div>
    </>
  );
}
