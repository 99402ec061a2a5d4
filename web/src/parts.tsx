// Small parts that several pages use.
import { type Signal, useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import type uPlot from "uplot";
import { clock, get, now, Problem, turns } from "./api";

/** What the pool answers to a GET; asked again when the feed names one of these topics. */
export function useLoad<T>(path: string, ...topics: string[]): { value: T | null; error: Problem | null } {
  const state = useSignal<{ value: T | null; error: Problem | null }>({ value: null, error: null });
  const wanted = useRef<string | null>(null);
  const asking = useRef<"no" | "once" | "again">("no"); // changes that come meanwhile are one more
  const turn = ["all", ...topics].map((topic) => turns.value[topic] ?? 0).join();
  const ask = async () => {
    if (asking.current !== "no") return void (asking.current = "again");
    do {
      asking.current = "once";
      const path = wanted.current;
      if (path === null) break;
      try {
        const value = await get<T>(path);
        if (wanted.current === path) state.value = { value, error: null };
      } catch (error) {
        if (wanted.current === path) state.value = { value: state.value.value, error: error as Problem };
      }
    } while ((asking.current as string) === "again");
    asking.current = "no";
  };
  useEffect(() => {
    wanted.current = path;
    void ask();
  }, [path, turn]);
  useEffect(() => () => void (wanted.current = null), []);
  return state.value;
}

/** A page, or a part of one without a title, that has no answer yet, or got a refusal. */
export function Loading({ error, title }: { error: Problem | null; title?: string }) {
  return <>{title && <h1>{title}</h1>}{error ? <Trouble problem={error} /> : <p class="quiet">…</p>}</>;
}

/** Leads through answers that have more rows than one page. */
export function Pages({ first, following, what }: { first: Signal<number>; following: number | null; what: string }) {
  if (!first.value && following === null) return null;
  return (
    <p class="actions">
      {first.value > 0 && <button onClick={() => (first.value = 0)}>First page</button>}
      {following !== null && <button onClick={() => (first.value = following)}>Next page</button>}
      <span class="quiet">{what} from {first.value + 1} on</span>
    </p>
  );
}

export function Trouble({ problem }: { problem: Problem }) {
  return (
    <div class="trouble" role="alert">
      <p>{problem.message}</p>
      {problem.unblock.map((text) => <code>{text}</code>)}
    </div>
  );
}

/** A table; its caption is for screen readers, as a heading stands above it. Columns without content are left out.
 * On a phone each row is a card. Browsers then forget that it is a table, hence the roles. */
export function Table({ caption, heads, rows, empty, help }: {
  caption: string; heads: string[]; rows: ComponentChildren[][]; empty: string; help?: string;
}) {
  if (!rows.length) return <p class="quiet">{empty}{help && <> <code>{help}</code></>}</p>;
  const shown = heads.map((_, column) => rows.some((row) => row[column] !== "" && row[column] != null));
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={caption}>
      <table role="table">
        <caption>{caption}</caption>
        <thead role="rowgroup"><tr role="row">{heads.map((h, column) => shown[column] && <th scope="col" role="columnheader">{h || <span class="aside">state</span>}</th>)}</tr></thead>
        <tbody role="rowgroup">{rows.map((row) => <tr role="row">{row.map((cell, column) => shown[column] && <td role="cell" data-head={heads[column]}><div>{cell}</div></td>)}</tr>)}</tbody>
      </table>
    </div>
  );
}

/** What the marks of a chart mean. */
export function Key({ items, text }: { items: [mark: string, name: string][]; text: string }) {
  return <p class="key quiet">{items.map(([mark, name]) => <span><i class={mark} aria-hidden="true" />{name}</span>)}<span>{text}</span></p>;
}

export function Bar({ parts, total, label }: {
  parts: { size: number; colour: string; title: string; pale?: boolean }[]; total: number; label: string;
}) {
  let at = 0;
  return (
    <svg class="bar" viewBox="0 0 1000 24" preserveAspectRatio="none" role="img" aria-label={label}>
      <rect class="back" width="1000" height="24" />
      {parts.map((p) => {
        const x = at;
        const width = total ? (p.size / total) * 1000 : 0;
        at += width;
        return <rect x={x} width={width} height="24" fill={p.colour} opacity={p.pale ? 0.35 : 1}><title>{p.title}</title></rect>;
      })}
    </svg>
  );
}

export interface Span { device: number; session: number; client: string; program: string; since: number; until: number | null }

const short = (at: number) => new Date(at * 1000).toLocaleTimeString([], { timeStyle: "short" });

/** Who was on each device: a row each, time from left to right. */
export function Gantt({ spans, names, from, paint, paused }: {
  spans: Span[]; names: Map<number, string>; from: number; paint: (name: string) => string; paused: Set<number>;
}) {
  const end = now.value;
  const x = (at: number) => ((Math.max(at, from) - from) / (end - from)) * 1000;
  return (
    <figure>
      <div class="grid gantt">
        {[...names].map(([device, name]) => {
          const mine = spans.filter((s) => s.device === device && (s.until ?? end) > from);
          return <>
            <a href={`/device/${device}`}>{name}</a>
            <svg viewBox="0 0 1000 24" role="img" preserveAspectRatio="none" aria-label={`${name}: ${[...new Set(mine.map((s) => s.client))].join(", ") || "idle"} since ${short(from)}`}>
              <rect class="back" width="1000" height="24" />
              {mine.map((s) => (
                <rect x={x(s.since)} width={Math.max(3, x(s.until ?? end) - x(s.since))} y="2" height="20"
                  fill={s.until === null && paused.has(s.session) ? "var(--quiet)" : paint(s.client)}>
                  <title>{`${s.client} ${s.program}: ${clock(s.since)} to ${s.until ? clock(s.until) : "now"}`}</title>
                </rect>
              ))}
            </svg>
          </>;
        })}
        <span class="wide" />
        <div class="axis quiet"><span>{short(from)}</span><span>{short((from + end) / 2)}</span><span>now</span></div>
      </div>
      <figcaption>Who was on which device. A colour is a client; grey is suspended. A device's page has the same as a table.</figcaption>
    </figure>
  );
}

const hidden = { show: false };

let charts: Promise<typeof uPlot> | undefined; // half of the bundle: it comes after the first view

/** Draw a chart into a place, again when the samples or the options change. */
function useChart(times: number[], options: (width: number) => uPlot.Options, lines: number[][]) {
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (times.length < 2) return;
    let plot: uPlot | undefined;
    let over = false;
    charts ??= import("uplot").then((found) => found.default);
    void charts.then((Plot) => {
      if (place.current && !over) plot = new Plot(options(place.current.clientWidth), [times, ...lines], place.current);
    });
    return () => {
      over = true;
      plot?.destroy();
    };
  }, [times.at(-1)]);
  return place;
}

/** A small chart of memory in use (filled) and messages a second. */
export function Spark({ name, from, times, used, calls, total }: { name: string; from: number; times: number[]; used: number[]; calls: number[]; total: number }) {
  const place = useChart(times, (width) => ({
    width, height: 44, padding: [3, 0, 3, 0], legend: hidden, cursor: hidden, axes: [hidden, hidden],
    scales: { x: { range: [from, times.at(-1)!] }, y: { range: [0, Math.max(1, total)] }, calls: { range: (_, __, most) => [0, Math.max(1, most)] } },
    series: [{}, { stroke: "#0072b2", fill: "#0072b244", points: hidden }, { scale: "calls", stroke: "#009e73", points: hidden }],
  }), [used, calls]);
  return <div ref={place} class="spark" role="img" aria-label={`${name}: memory in use and messages over time, now ${Math.round(calls.at(-1) ?? 0)} messages a second`} />;
}

export function Chart({ title, from, times, lines, show, most }: {
  title: string; from: number; times: number[]; lines: { name: string; values: number[]; colour: string }[]; show: (v: number) => string; most?: number;
}) {
  const place = useChart(times, (width) => {
    const style = getComputedStyle(document.documentElement);
    const axis = { stroke: style.getPropertyValue("--quiet"), grid: { stroke: style.getPropertyValue("--line"), width: 1 } };
    const minutes = { incrs: [1, 2, 5, 10, 15, 30].map((m) => m * 60), values: (_: uPlot, all: number[]) => all.map(short) };
    const quarters = most && { splits: [0, 1, 2, 3, 4].map((quarter) => (quarter * most) / 4) };
    return {
      width, height: 180, legend: hidden, cursor: hidden,
      axes: [{ ...axis, ...minutes }, { ...axis, size: 76, values: (_, all) => all.map(show), ...quarters }],
      scales: { x: { range: [from, times.at(-1)!] }, y: { range: (_, __, highest) => [0, most ?? Math.max(1, highest * 1.05)] } },
      series: [{}, ...lines.map((l) => ({ label: l.name, stroke: l.colour, width: 2, fill: l.colour + "22", points: hidden }))],
    };
  }, lines.map((l) => l.values));
  const last = lines.map((l) => `${l.name} ${show(l.values.at(-1) ?? 0)}`).join(", ");
  return (
    <figure>
      <div ref={place} class="chart" role="img" aria-label={`${title}: now ${last}`}>{times.length < 2 && <p class="quiet">The first samples come in some seconds.</p>}</div>
      <figcaption class="key">{lines.map((l) => <span><i class="line" style={{ background: l.colour }} aria-hidden="true" />{l.name}, now {show(l.values.at(-1) ?? 0)}</span>)}</figcaption>
    </figure>
  );
}
