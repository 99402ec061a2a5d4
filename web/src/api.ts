// Requests to the HTTP API, the feed, and what all pages share.
import { signal } from "@preact/signals";

export class Problem extends Error {
  constructor(readonly status: number, detail: string, readonly unblock: string[]) {
    super(detail);
  }
}

export interface Me { name: string; role: string; event: string; scope: string }

export const me = signal<Me | null | undefined>(undefined); // undefined: not known yet
export const admin = () => me.value?.role === "admin" || me.value?.role === "owner";
export const live = signal(false);
export const now = signal(Date.now() / 1000);

export async function api<T>(method: string, path: string, body?: object): Promise<T> {
  const headers: Record<string, string> = {};
  if (method !== "GET") headers["X-Shoal"] = "1";
  if (body) headers["Content-Type"] = "application/json";
  let response: Response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
  } catch {
    throw new Problem(0, "the dashboard does not answer", ["shoal status"]);
  }
  if (!response.ok) {
    const told = await response.json().catch(() => ({}));
    if (response.status === 401 && me.value?.name) me.value = null;
    throw new Problem(response.status, told.detail ?? response.statusText, told.unblock ?? []);
  }
  if (response.status === 204) return undefined as T;
  const kind = response.headers.get("content-type") ?? "";
  return (kind.startsWith("application/json") ? response.json() : response.text()) as Promise<T>;
}

export const get = <T>(path: string) => api<T>("GET", path);
export const post = <T>(path: string, body: object = {}) => api<T>("POST", path, body);

/** Sign in with the ticket behind the #, and take it out of the address. */
export async function start(): Promise<void> {
  const ticket = /^#ticket=([\w-]+)$/.exec(location.hash)?.[1];
  if (ticket) {
    history.replaceState(null, "", location.pathname);
    try {
      await post("/v1/sign-in", { ticket });
    } catch (error) {
      problem.value = error as Problem;
    }
  }
  await whoami(ticket ? "/v1/me" : "/v1/me?early"); // index.html has asked for that already
  setInterval(() => (now.value = Date.now() / 1000), 1000);
}

export const problem = signal<Problem | null>(null);

export async function whoami(path = "/v1/me"): Promise<void> {
  try {
    const found = await get<Me>(path);
    me.value = found.name ? found : null;
  } catch {
    me.value = null;
  }
  unfollow();
  if (me.value) follow();
}

// --- the feed: one connection for all tabs, since HTTP/1.1 has six of them ----------------------------

/** How often each topic has changed. Pages ask again when one of theirs has. */
export const turns = signal<Record<string, number>>({});
interface Heard { kind: "change" | "reset" | "live" | "away" | "signed-out" | "who"; topics: string[] }
const tabs = new BroadcastChannel("shoal-feed");
let feed: EventSource | null = null;
let giveUp: (() => void) | null = null; // this tab's turn to follow for all of them

export function changed(...topics: string[]): void {
  const next = { ...turns.value };
  for (const topic of topics) {
    const known = topic === "head" ? "all" : topic;
    next[known] = (next[known] ?? 0) + 1;
    if (topic.startsWith("event ")) next.events = (next.events ?? 0) + 1;
  }
  turns.value = next;
}

function hear({ kind, topics }: Heard): void {
  if (kind === "who") {
    if (feed) tabs.postMessage({ kind: live.value ? "live" : "away", topics: [] });
    return;
  }
  live.value = kind !== "away" && kind !== "signed-out";
  if (kind === "reset") changed("all");
  if (kind === "change") changed(...topics);
  if (kind === "signed-out") {
    unfollow();
    me.value = null;
  }
}
tabs.onmessage = (event) => hear(event.data);

function open(): void {
  feed = new EventSource("/v1/feed");
  const tell = (kind: Heard["kind"], topics: string[] = []) => {
    tabs.postMessage({ kind, topics });
    hear({ kind, topics });
  };
  feed.onopen = () => tell("live");
  feed.onerror = () => {
    tell("away");
    // A browser gives up after an answer that is not a stream, as when the head was away.
    if (feed?.readyState === EventSource.CLOSED) setTimeout(() => feed && (feed.close(), open()), 1000);
  };
  feed.addEventListener("change", (event) => tell("change", JSON.parse(event.data).topics));
  feed.addEventListener("reset", () => tell("reset"));
  feed.addEventListener("signed-out", () => tell("signed-out"));
}

function follow(): void {
  if (!navigator.locks) return open(); // plain HTTP beyond this machine
  const stop = new AbortController();
  giveUp = () => stop.abort();
  tabs.postMessage({ kind: "who", topics: [] });
  const turn = () => new Promise<void>((done) => {
    giveUp = done;
    open();
  });
  navigator.locks.request("shoal-feed", { signal: stop.signal }, turn).catch(() => undefined);
}

function unfollow(): void {
  feed?.close();
  feed = null;
  giveUp?.();
  giveUp = null;
  live.value = false;
}

/** Do something that may fail, and show why it did. */
export async function attempt(action: () => Promise<unknown>): Promise<void> {
  problem.value = null;
  try {
    await action();
    changed("all");
  } catch (error) {
    problem.value = error as Problem;
  }
}

// --- how values are shown ---------------------------------------------------------------------------

export function bytes(count: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < 4) {
    count /= 1024;
    unit++;
  }
  return `${count < 10 && unit ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

export function ago(seconds: number): string {
  seconds = Math.max(0, seconds);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]] as const) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  }
  return `${Math.floor(seconds)} s`;
}

/** The bytes that "8GiB" or "512 MB" means; NaN if it means none. */
export function sizeOf(text: string): number {
  const found = /^([0-9.]+)\s*([kmgt]?)(i?)b?$/i.exec(text.trim());
  if (!found) return NaN;
  const power = " kmgt".indexOf(found[2].toLowerCase() || " ");
  return Math.round(Number(found[1]) * (found[3] ? 1024 : 1000) ** power);
}

/** A time of today without the day, and any other with it. */
export function clock(at: number): string {
  const time = new Date(at * 1000);
  if (time.toDateString() === new Date().toDateString()) return time.toLocaleTimeString([], { timeStyle: "medium" });
  return time.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

/** "1 device", "3 devices". */
export const count = (number: number, what: string) => `${number} ${what}${number === 1 ? "" : "s"}`;

/** Colours that people with any colour vision can tell apart (Okabe and Ito). */
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const KEPT = "shoal-colours"; // in this tab, so that a name keeps its colour from page to page
const painted = new Map<string, number>(JSON.parse(sessionStorage.getItem(KEPT) ?? "[]"));

/** The colour of a name: another one for each, as long as there are any. */
export function colour(name: string): string {
  let number = painted.get(name);
  if (number === undefined) {
    const uses = COLOURS.map((_, one) => [...painted.values()].filter((other) => other === one).length);
    number = uses.indexOf(Math.min(...uses));
    painted.set(name, number);
    if (painted.size > 1000) painted.clear();
    sessionStorage.setItem(KEPT, JSON.stringify([...painted]));
  }
  return COLOURS[number];
}
