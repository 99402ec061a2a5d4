// The dashboard: which page the address names, the frame around it, and signing in.
import { useSignal } from "@preact/signals";
import { render } from "preact";
import { useEffect } from "preact/hooks";
import "../node_modules/uplot/dist/uPlot.min.css";
import "./app.css";
import { admin, attempt, live, me, post, problem, start, whoami } from "./api";
import { Enrol, EventPage, Events, Screen } from "./events";
import { Trouble } from "./parts";
import { Memory } from "./memory";
import { Approve, Audit, Doctor, People } from "./pages";
import { Device, Pool } from "./pool";
import { Task, Tasks } from "./tasks";

const LINKS = [
  ["/", "Pool"], ["/tasks", "Tasks"], ["/memory", "Memory"], ["/events", "Events"],
  ["/people", "People"], ["/audit", "Audit"], ["/doctor", "Doctor"],
] as const;
const ADMINS = ["/audit"];

function Page({ path }: { path: string }) {
  const [first, second, third] = path.split("/").slice(1).map(decodeURIComponent);
  switch (first) {
    case "": return <Pool />;
    case "device": return <Device number={Number(second)} />;
    case "tasks": return <Tasks />;
    case "task": return <Task id={second} />;
    case "memory": return <Memory />;
    case "approve": return <Approve />;
    case "people": return <People />;
    case "events": return <Events />;
    case "event": return third === "screen" ? <Screen event={second} /> : <EventPage event={second} />;
    case "audit": return <Audit />;
    case "doctor": return <Doctor />;
    default: return <><h1>There is no such page</h1><p><a href="/">The pool</a></p></>;
  }
}

function SignIn() {
  const claimed = useSignal<{ digits: string; claim: string; qr: string; link: string } | null>(null);
  useEffect(() => {
    if (!claimed.value) return;
    const { claim } = claimed.value;
    const timer = setInterval(async () => {
      try {
        await post("/v1/sign-in", { ticket: claim });
        await whoami();
      } catch {
        // Nobody has approved it yet.
      }
    }, 2000);
    return () => clearInterval(timer);
  }, [claimed.value]);
  const digits = claimed.value?.digits;
  return (
    <section>
      <h1>Sign in</h1>
      <p>On a machine that is in the pool, type</p>
      <pre>shoal open</pre>
      {digits
        ? <p role="status">This browser asks to sign in. A member types<br /><code class="big">shoal approve {digits.slice(0, 3)}-{digits.slice(3)}</code><br />or scans this with a phone that is signed in<br /><img width="220" src={claimed.value!.qr} alt={`QR code of ${claimed.value!.link}`} /></p>
        : <button onClick={() => attempt(async () => (claimed.value = await post("/v1/sign-in/claim")))}>Ask a member instead</button>}
      <p><a href="/enrol">I have the code of an event</a></p>
    </section>
  );
}

function App() {
  const path = location.pathname;
  const person = me.value;
  useEffect(() => document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" }), [person]);
  if (person === undefined) return null;
  const guest = person?.role === "guest";
  const screen = path.endsWith("/screen");
  const body = path === "/enrol" ? <Enrol /> : !person && !path.startsWith("/event/") ? <SignIn /> : <Page path={guest && !path.startsWith("/event/") ? `/event/${person!.event}` : path} />;
  return (
    <>
      <a class="skip" href="#main">Skip to the page</a>
      {!screen && (
        <header>
          <strong>Shoal</strong>
          <nav aria-label="Pages">
            {person && !guest && LINKS.filter(([to]) => admin() || !ADMINS.includes(to)).map(([to, name]) => (
              <a href={to} aria-current={path === to ? "page" : undefined}>{name}</a>
            ))}
          </nav>
          {!person && path !== "/" && <a href="/">Sign in</a>}
          {person && (
            <span class="who">
              <span class={live.value ? "dot on" : "dot"} title={live.value ? "live" : "not connected"} /> {person.name}{" "}
              <button onClick={() => attempt(async () => { await post("/v1/sign-out"); await whoami(); })}>Sign out</button>
            </span>
          )}
        </header>
      )}
      <main id="main">
        {problem.value && <Trouble problem={problem.value} />}
        {body}
      </main>
      {!screen && <footer><a href="/assets/licences.txt">Licences</a> <a href="/v1/openapi.json">API</a></footer>}
    </>
  );
}

start().then(() => render(<App />, document.getElementById("app")!));
