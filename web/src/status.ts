// What the pool says of itself: the types of GET /v1/pool and /v1/tasks.
export interface Dev { number: number; name: string; memory_bytes: number; free_bytes: number; sessions: number; speed: number; threads: number; kind: string; node: string }
export interface Use { memory_bytes: number; calls: number; bytes_in: number; bytes_out: number }
/** What a session's worker counts itself. */
export interface Profile { state: string; used_bytes: number; away_bytes: number; host_bytes: number; disk_bytes: number; peak_bytes: number; steps: number }
export interface Session {
  session: number; lease: number; client: string; program: string; device: number; granted_bytes: number; since: number;
  use: Use | null; profile: Profile | null;
}
export interface Status {
  pool: string; shoal: string; listen: string; started: number; now: number; devices: Dev[]; sessions: Session[];
  nodes: { name: string; state: string; devices: number; failures: string[] }[];
}
export interface Reason { code: string; text: string; numbers: Record<string, number>; never?: boolean }
export interface TaskInfo {
  id: string; name: string; owner: string; state: string; devices: string[]; reasons: Reason[]; position: number | null; attempt: number | null;
  needs: { devices: number; kind: string | null; memory_bytes: number | null } | null; exit_code: number | null; end_reason: string | null;
  submitted_at: string | null; started_at: string | null; ended_at: string | null;
}
export interface Profiles {
  devices: { number: number; profile: { flops_per_s: Record<string, number>; bytes_per_s: number; call_s: number; links: Record<string, number> } }[];
}
export interface Tasked { tasks: TaskInfo[]; following: number | null }
type Sample = [at: number, granted: number, used: number, calls: number];
export interface History { samples: Sample[]; spans: import("./parts").Span[]; devices: { device: number; samples: Sample[] }[] }

/** A program without its folders, cut off. */
export const short = (program: string) => program.split(/\s+/).map((w) => w.split("/").at(-1)).join(" ").slice(0, 40);
/** The task that a program says it belongs to; undefined: none. */
export const taskOf = (program: string) => /^([^\s:]+-\d+): /.exec(program)?.[1];
/** What a session has on its device, in host memory and on disk: as its worker counts, else as its client does. */
export function places(s: Session): { device: number; host: number; disk: number } {
  if (s.profile) return { device: s.profile.used_bytes, host: s.profile.host_bytes, disk: s.profile.disk_bytes };
  return { device: Math.min(s.use?.memory_bytes ?? 0, s.granted_bytes), host: 0, disk: 0 };
}
/** Bytes of a device that nobody holds and nobody gets: kept for a place of an event, or for a task that starts. */
export function kept(device: Dev, sessions: Session[]): number {
  const held = sessions.filter((s) => s.device === device.number && s.profile?.state !== "suspended").reduce((all, s) => all + s.granted_bytes, 0);
  return Math.max(0, device.memory_bytes - device.free_bytes - held);
}
/** Where the addresses of a session begin: it has 2^52 of them (csrc/wire/address.h). */
export const address = (session: number) => `0x${(BigInt(session) << 52n).toString(16).padStart(16, "0")}`;
